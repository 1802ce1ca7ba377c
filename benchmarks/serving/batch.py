"""Throughput of `vllm-kvx batch` under policies, each on a server of its own.

    python -m benchmarks.serving.batch MODEL --policies full speed-24 --output batch.json -- -tp 2

MODEL is a shape with random weights (`llama-3.1-8b`), or a checkpoint. Prompts are random tokens,
all different. What follows ``--`` are flags of `vllm serve`. Starting the servers does not count.
Policies take turns, so that a machine that changes meanwhile shows.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.about import about, command_line
from benchmarks.common.names import served
from benchmarks.common.word_tokenizer import write_tokenizer
from benchmarks.engine.compare import prepare_model
from benchmarks.engine.shapes import SHAPES
from benchmarks.serving.client import MODEL


def main() -> None:
    """Runs the command line and writes the result."""
    args = _arguments()
    runs: dict[str, list[dict[str, float]]] = {policy: [] for policy in args.policies}
    with tempfile.TemporaryDirectory() as folder:
        batch = Path(folder) / "in.jsonl"
        write_batch(batch, args)
        _, model = prepare_model(args.model, Path(folder))
        if "load_format" in model:
            write_tokenizer(Path(folder), SHAPES[args.model].vocab)
            args.serve += ["--load-format", model["load_format"]]
        for repeat in range(args.repeats):
            for policy in args.policies:
                runs[policy].append(
                    run(
                        batch,
                        Path(folder) / f"{repeat}-{policy}.jsonl",
                        policy,
                        model["model"],
                        args,
                    )
                )
    first = args.policies[0]
    lines = {
        policy: statistics.median(each["answered"] / each["seconds"] for each in found)
        for policy, found in runs.items()
    }
    result = {
        "about": about(
            "Lines a second of one batch of random prompts, by `vllm-kvx batch` under each policy.",
            command_line("benchmarks.serving.batch", sys.argv[1:]),
            args.commit,
        ),
        "lines_per_second": {policy: round(value, 3) for policy, value in lines.items()},
        f"times_{first}": {
            policy: round(value / lines[first], 3) for policy, value in lines.items()
        },
        "runs": runs,
    }
    Path(args.output).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["lines_per_second"]), json.dumps(result[f"times_{first}"]))


def write_batch(path: Path, args: argparse.Namespace) -> None:
    """`args.lines` completions of `args.length` tokens, a quarter more or less."""
    rng = random.Random(args.seed)
    with path.open("w") as file:
        for number in range(args.lines):
            length = round(args.length * rng.uniform(0.75, 1.25))
            body: dict[str, Any] = {
                "model": MODEL,
                "prompt": [rng.randrange(*args.tokens) for _ in range(length)],
                "max_tokens": args.answer,
                "ignore_eos": True,
                "temperature": 0,
            }
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions"}
            print(json.dumps({**line, "body": body}), file=file)


def run(
    batch: Path, answers: Path, policy: str, model: str, args: argparse.Namespace
) -> dict[str, float]:
    """One run's summary; every line must have been answered."""
    summary = answers.with_suffix(".summary")
    command = [sys.executable, "-m", "vllm_kvx.cli", "batch", str(batch), str(answers), model]
    command += ["--served-model-name", MODEL, "--kv-policy", served(policy), *args.serve]
    command += ["--summary", str(summary)]
    subprocess.run(command, check=True)
    found: dict[str, float] = json.loads(summary.read_text())
    if found["answered"] != args.lines:
        raise SystemExit(f"{policy}: {found['errors']} lines are errors, see {answers}")
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--policies", nargs="+", default=["full", "speed-24"])
    parser.add_argument("--lines", type=int, default=64)
    parser.add_argument("--length", type=int, default=16384, help="tokens of a prompt, about")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer")
    parser.add_argument(
        "--tokens", type=int, nargs=2, default=[1000, 30000], help="ids, from and to"
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="what is measured, where the tree is no git checkout")
    parser.add_argument("--output", default="batch.json")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:end])
    args.serve = sys.argv[end + 1 :]
    return args


if __name__ == "__main__":
    main()
