"""Puts answers of lm-eval and of `vllm-kvx evaluate` to the same questions into one file.

docs/use/lm-eval.md has the steps before it.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.about import about, command_line
from benchmarks.common.files import write_json


class Asked(NamedTuple):
    """Which of a task's questions, and the whole name of the policy under which it was asked."""

    policy: str
    question: int


# An answer's text and score, 0 to 1.
_Answer = tuple[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lm_eval", type=Path, metavar="RESULTS", help="lm-eval's --output_path")
    parser.add_argument("evaluate", type=Path, metavar="ANSWERS", help="evaluate's --output")
    parser.add_argument("--steps", type=Path, required=True, help="file of other commands, by line")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    steps = [*args.steps.read_text(encoding="utf-8").splitlines(), _facts(args.evaluate)["command"]]
    own = command_line("benchmarks.answers.lm_eval.record", sys.argv[1:])
    content = record(args.lm_eval, args.evaluate, [*steps, own])
    write_json(args.output, content)
    for name, row in content["policies"].items():
        shares = f"{row['lm_eval']:.1%} {row['evaluate']:.1%}"
        print(f"{name:32} {shares}, {row['same_answers']} of {row['n']} answers are the same")
    return 0


def record(lm_eval: Path, evaluate: Path, commands: Sequence[str]) -> dict[str, Any]:
    """The file's content.

    Args:
        lm_eval: folder with lm-eval's samples, whose requests name their policy.
        evaluate: folder that `vllm-kvx evaluate` wrote.
        commands: of the whole, for the head.

    Raises:
        ValueError: the two were not asked the same questions under the same policies.
    """
    facts, (values, theirs), ours = _facts(evaluate), _of_lm_eval(lm_eval), _of_evaluate(evaluate)
    if differing := sorted(theirs.keys() ^ ours.keys()):
        named = ", ".join(f"{index} under {policy}" for policy, index in differing)
        raise ValueError(f"one of the two was not asked question {named}")
    policies: dict[str, Any] = {}
    for policy in dict.fromkeys(asked.policy for asked in ours):
        asked = [each for each in ours if each.policy == policy]
        policies[policy] = {
            "n": len(asked),
            "lm_eval": _mean([theirs[each] for each in asked]),
            "evaluate": _mean([ours[each] for each in asked]),
            "same_answers": sum(theirs[each][0] == ours[each][0] for each in asked),
            "answers": [
                {
                    "index": each.question,
                    "value": values[each.question],
                    "lm_eval": theirs[each],
                    "evaluate": ours[each],
                }
                for each in asked
            ],
        }
    what = f"lm-eval and `vllm-kvx evaluate` ask one server the same {facts['samples']} lookups."
    head = about(what, commands, packages=("transformers",))
    head["versions"]["lm_eval"] = _version(lm_eval)
    return {
        "about": head,
        "note": "each answer as [text, score]",
        "model": facts["model"],
        "task": f"{facts['tasks'][0]}, {facts['lengths'][0]:,} tokens, seed {facts['seed']}",
        "policies": policies,
    }


def _facts(evaluate: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((evaluate / "run.json").read_text(encoding="utf-8"))
    return facts


def _of_lm_eval(folder: Path) -> tuple[dict[int, str], dict[Asked, _Answer]]:
    """The questions' right answers, and lm-eval's."""
    values: dict[int, str] = {}
    answers: dict[Asked, _Answer] = {}
    for line in _lines(folder.rglob("samples_*.jsonl")):
        index = line["doc"]["index"]
        values[index] = line["doc"]["references"][0]
        options = line["arguments"]["gen_args_0"]["arg_1"]
        asked = Asked(options["vllm_xargs"]["kv_policy"], index)
        answers[asked] = line["resps"][0][0], line["score"]
    return values, answers


def _of_evaluate(folder: Path) -> dict[Asked, _Answer]:
    """Those of `vllm-kvx evaluate`, under what its rows' names were asked as."""
    resolved = _facts(folder)["resolved"]
    answers: dict[Asked, _Answer] = {}
    for line in _lines([folder / "answers.jsonl"]):
        question = line["question"]
        asked = Asked(resolved[question["policy"]], question["index"])
        answers[asked] = line["text"], line["score"]
    return answers


def _lines(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def _mean(answers: Sequence[_Answer]) -> float:
    return round(sum(score for _, score in answers) / len(answers), 4)


def _version(folder: Path) -> str:
    """lm-eval's, which its files of results have."""
    (version,) = {
        json.loads(path.read_text(encoding="utf-8"))["lm_eval_version"]
        for path in folder.rglob("results_*.json")
    }
    return str(version)


if __name__ == "__main__":
    sys.exit(main())
