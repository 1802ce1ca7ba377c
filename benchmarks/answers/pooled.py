"""What policies keep over the prompts of several result files together.

    python -m benchmarks.answers.pooled FILE FILE [FILE ...]

The files are those of `benchmarks.answers.quality`, with every answer's score (`scores`), of one
model under different prompts, such as other lengths. Each prompt is paired with `full` in its own
file, so the files may be of different machines. Prints a Markdown table of the policies that all
files have. What scores do not say, such as entries kept, stands in the files alone.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.files import read_json
from vllm_kvx.tools.evaluate.intervals import of_mean, of_ratio
from vllm_kvx.tools.evaluate.store import SAME

FULL = "full"
# A prompt, by its task, length and index.
Prompt = tuple[str, int, int]


def scores_by_policy(content: Mapping[str, Any]) -> dict[str, dict[Prompt, float]]:
    """Of each policy of a file the score of every prompt that it answered."""
    found: dict[str, dict[Prompt, float]] = {}
    for line in content["scores"]:
        own = found.setdefault(line["policy"], {})
        for index, score in enumerate(line["scores"].split()):
            if score != "-":
                own[line["task"], line["length"], index] = float(score)
    return found


def pooled(contents: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """The scores of each policy that all files have, each beside `full`'s of the same prompt.

    Raises:
        SystemExit: the files are not of one model asked in one way, or share a prompt; or one has
            no scores, as those written before 28 November 2026, or none of `full`.
    """
    first = contents[0]
    if not all("scores" in content for content in contents):
        raise SystemExit("a file has no score of each answer")
    for content in contents[1:]:
        for name in SAME:
            if content.get(name) != first.get(name):
                raise SystemExit(f"{name} is {content.get(name)!r}, not {first.get(name)!r}")
    files = [scores_by_policy(content) for content in contents]
    if not all(FULL in file for file in files):
        raise SystemExit(f"a file has no answers of {FULL}, which each prompt is paired with")
    asked = [prompt for file in files for prompt in file[FULL]]
    if len(asked) != len(set(asked)):
        raise SystemExit("a prompt stands in two files")
    return {
        policy: [
            (score, file[FULL][prompt])
            for file in files
            for prompt, score in file[policy].items()
            if prompt in file[FULL]
        ]
        for policy in files[0]
        if all(policy in file for file in files)
    }


def markdown(pairs: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """A line for each policy: prompts, right answers and their share of `full`'s in %."""
    lines = ["| policy | n | right | of `full` |", "| --- | --- | --- | --- |"]
    for policy, both in pairs.items():
        ratio = of_ratio(both)
        right, *ends = (100 * share for share in of_mean([score for score, _ in both]))
        kept = "-" if ratio is None else "{:.1f} [{:.1f}-{:.1f}]".format(*(100 * v for v in ratio))
        lines.append(
            f"| `{policy}` | {len(both)} | {right:.1f} [{ends[0]:.0f}-{ends[1]:.0f}] | {kept} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.answers.pooled", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args()
    writer = "benchmarks.answers.quality"
    print(markdown(pooled([read_json(file, writer, "model", "scores") for file in args.files])))


if __name__ == "__main__":
    main()
