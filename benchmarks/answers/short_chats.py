"""What policies keep of short prompts, from runs of `vllm-kvx evaluate`, one of each model.

    python -m benchmarks.answers.short_chats NAME DIR [DIR ...]

Writes benchmarks/results/answers/NAME.json: by model and policy, the share of full's right answers
that stay and of its answers that come out word for word, over prompts of at most `LONGEST` tokens
and longer ones apart. Prints the former as a Markdown table.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.about import about
from benchmarks.common.files import RESULTS, read_json, write_json
from vllm_kvx.tools.evaluate.rows import FULL_ROW, Row
from vllm_kvx.tools.evaluate.store import Answer, QuestionId, Store

LONGEST = 512
_FACTS = ("model", "model_key", "seed", "dtype", "tasks", "lengths", "samples", "engine_args")
_Answers = Mapping[tuple[Row, QuestionId], Answer]


def kept(answers: _Answers, rows: Iterable[Row], short: bool) -> dict[str, Any]:
    """By policy, over prompts that are short or not: the shares, and n."""
    full = {
        answer.question: answer
        for answer in answers.values()
        if answer.row == FULL_ROW and is_short(answer) == short
    }
    right = sum(answer.score for answer in full.values())
    found = {}
    for row in rows:
        pairs = [(a, answers[row, question]) for question, a in full.items()]
        found[str(row)] = {
            "n": len(pairs),
            "right": round(sum(ours.score for _, ours in pairs), 3),
            "of_full": round(sum(ours.score for _, ours in pairs) / right, 4),
            "same_text": round(sum(a.text == b.text for a, b in pairs) / len(pairs), 4),
        }
    return found


def is_short(answer: Answer) -> bool:
    return answer.tokens <= LONGEST


def read(directory: Path) -> dict[str, Any]:
    """What one model's run says."""
    facts = read_json(directory / "run.json", "vllm-kvx evaluate", "command")
    answers = {answer.key: answer for answer in Store(directory, facts)}
    rows = list(dict.fromkeys(row for row, _ in answers))
    # Folders of the machine that it ran on say nothing elsewhere.
    command = " ".join(Path(w).name if w.startswith("/") else w for w in facts["command"].split())
    return {
        "run": {
            **{name: facts[name] for name in (*_FACTS, "versions", "date")},
            "device": facts["device"],
            "command": command,
        },
        "short": kept(answers, rows, short=True),
        "longer": kept(answers, rows, short=False),
    }


def table(models: Sequence[Mapping[str, Any]]) -> str:
    """A line a policy, a column a model: % of full's right answers over short prompts."""
    names = [model["run"]["model"] for model in models]
    lines = [f"| policy | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for policies in zip(*(model["short"] for model in models), strict=True):
        cells = [
            f"{100 * m['short'][p]['of_full']:.0f}" for m, p in zip(models, policies, strict=True)
        ]
        lines.append(f"| `{policies[0]}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.answers.short_chats")
    parser.add_argument("name")
    parser.add_argument("directories", nargs="+", type=Path)
    args = parser.parse_args(argv)
    models = [read(directory) for directory in args.directories]
    last = max((model["run"] for model in models), key=lambda run: str(run["date"]))
    commands = [model["run"]["command"] for model in models]
    known = {key: last[key] for key in ("date", "device", "versions")}
    head = about("What policies keep of answers to short prompts, by model.", commands, **known)
    content = {"about": head, "longest": LONGEST, "models": models}
    write_json(RESULTS / "answers" / f"{args.name}.json", content)
    print(table(models))


if __name__ == "__main__":
    main(sys.argv[1:])
