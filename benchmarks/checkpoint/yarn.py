"""Gives a checkpoint a longer context by YaRN, without training (arXiv 2309.00071).

    python -m benchmarks.checkpoint.yarn models/qwen2.5-coder-1.5b models/qwen2.5-coder-1.5b-131k

Qwen's model cards give this setting, a factor of 4, for Qwen2.5 models of 7B and more. What it
keeps of a smaller one's answers is not said; it is for measurements that hold a policy against
full attention over the same long prompts. The new folder links to the old one's files.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def stretched(config: dict[str, Any], factor: float) -> dict[str, Any]:
    """The config of a model whose context is `factor` times as long.

    Raises ValueError if its rotary positions are scaled already, or it has none.
    """
    before = dict(config.get("rope_parameters") or {})
    if config.get("rope_scaling") or before.get("rope_type", "default") != "default":
        raise ValueError("its rotary positions are scaled already")
    theta = before.get("rope_theta", config.get("rope_theta"))
    length = config.get("max_position_embeddings")
    if theta is None or length is None:
        raise ValueError("its config has no rope_theta, or no max_position_embeddings")
    scaled = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": length,
    }
    longer = {"max_position_embeddings": int(length * factor), "rope_parameters": scaled}
    return {name: value for name, value in config.items() if name != "rope_theta"} | longer


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.checkpoint.yarn", description=__doc__.split("\n")[0]
    )
    parser.add_argument("model", type=Path, help="a checkpoint's folder")
    parser.add_argument("output", type=Path, help="the folder to write")
    parser.add_argument("--factor", type=float, default=4.0)
    args = parser.parse_args(argv)
    try:
        config = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
        config = stretched(config, args.factor)
        args.output.mkdir(parents=True)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {args.model} to {args.output}: {error}") from error
    for file in args.model.iterdir():
        if file.name != "config.json":
            (args.output / file.name).symlink_to(file.resolve())
    text = json.dumps(config, indent=1) + "\n"
    (args.output / "config.json").write_text(text, encoding="utf-8")
    print(f"{args.output}: {config['max_position_embeddings']:,} positions")


if __name__ == "__main__":
    main(sys.argv[1:])
