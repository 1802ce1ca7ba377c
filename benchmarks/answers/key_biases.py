"""How large the biases of a checkpoint's keys are, by layer: what an fp8 cache rounds coarsely.

    python -m benchmarks.answers.key_biases MODEL [MODEL ...] --out FILE

An fp8 number (e4m3) has three bits behind its leading one, so one of 256 to 448 is off by up to 16.
A key's bias is the same for every token, and is rounded with what tells tokens apart. Layers with
large ones are candidates for ``--kv-cache-dtype-skip-layers``; `vllm-kvx evaluate` says whether
that gives answers back. Reads weights alone: models without biases of keys, such as Llama and
Qwen3, have none to show.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from benchmarks.common.about import about
from benchmarks.common.files import write_json

_END = ".self_attn.k_proj.bias"


def biases(model: Path) -> dict[int, Tensor]:
    """By layer, (channels of all KV heads,) float32 absolute values. Raises SystemExit for none."""
    found: dict[int, Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in list(file.keys()):
                if name.endswith(_END):
                    layer = int(name.removesuffix(_END).rpartition(".")[2])
                    found[layer] = file.get_tensor(name).float().abs()
    if not found:
        raise SystemExit(f"no weights below {model} are biases of keys (*{_END})")
    return dict(sorted(found.items()))


def rows_of(found: dict[int, Tensor]) -> list[dict[str, Any]]:
    """By layer: the largest bias, and channels whose bias is above 32 and above 256."""
    return [
        {
            "layer": layer,
            "largest": round(float(each.max()), 2),
            "above_32": int((each > 32).sum()),
            "above_256": int((each > 256).sum()),
            "channels": each.numel(),
        }
        for layer, each in found.items()
    ]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    names = " ".join(model.name for model in args.models)
    results: dict[str, Any] = {
        "about": about(
            "How large the biases of checkpoints' keys are, by layer.",
            f"python -m benchmarks.answers.key_biases {names} --out {args.out.name}",
        ),
        "models": {},
    }
    for model in args.models:
        layers = rows_of(biases(model))
        results["models"][model.name] = {
            "architecture": json.loads((model / "config.json").read_text())["architectures"][0],
            "layers": layers,
        }
        largest = sorted(layers, key=lambda row: -row["largest"])[:6]
        found = ", ".join(f"{row['largest']} in layer {row['layer']}" for row in largest)
        print(f"{model.name}: {found}")
    write_json(args.out, results)


if __name__ == "__main__":
    main(sys.argv[1:])
