"""How many of its own drafts a model accepts, by what the drafter reads, length and depth.

    python -m benchmarks.answers.own_drafts [--model DIR] [--policies fier-32 fier-256] --out NAME

Writes benchmarks/results/answers/NAME.json. Two tasks over prompts of several lengths: `lookup`, a
question whose answer is in the document, answered to its end, and `text`, the document by itself,
which goes on for `TEXT_TOKENS` tokens. Answers are greedy, under `full`; how many are those of a
server without drafts, token for token, is counted. On a CPU with the demo checkpoint it takes
several minutes a policy. The file is written again after each row.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.checkpoint.prompts import make_prompt
from benchmarks.common.about import about, command_line
from benchmarks.common.drafts import DraftingServer
from benchmarks.common.files import RESULTS, ROOT, write_json
from vllm_kvx.tools.engine import on_cpu, prepare_environment
from vllm_kvx.tools.tasks.prompts import fitted
from vllm_kvx.tools.tasks.table import TASKS

DEMO = ROOT / "tests" / "checkpoints" / "lookup-8l"
TEXT_TOKENS, ANSWER_TOKENS, VALUES = 48, 16, 3
# For answers, behind the longest prompts.
ROOM = 512


def asked_of(tokenizer: Any, task: str, length: int, count: int) -> list[list[int]]:
    """Token ids of prompts of one of ``vllm_kvx.tools.tasks``, for any tokenizer."""
    seeds = (f"own drafts {number} {task}" for number in range(count))
    return [list(fitted(TASKS[task], seed, length, tokenizer).token_ids) for seed in seeds]


def prompts_of(tokenizer: Any, length: int, count: int) -> dict[str, list[list[int]]]:
    """Token ids by task, of prompts of so many tokens."""
    texts = [make_prompt(seed, length, tokenizer, VALUES)[0] for seed in range(count)]
    lookups = [tokenizer(text).input_ids for text in texts]
    # The question is the last line.
    documents = [tokenizer(text.rpartition("\n")[0]).input_ids for text in texts]
    return {"lookup": lookups, "text": documents}


class Server(DraftingServer):
    """An engine under `full`, with drafts by `policy` or without any."""

    def __init__(self, args: argparse.Namespace, policy: str | None) -> None:
        from vllm import LLM

        drafts: dict[str, Any] = {}
        if policy is not None:
            drafter = {"method": "kvx", "policy": policy, "cache_to_weights": 0}
            drafts["speculative_config"] = drafter | {"num_speculative_tokens": args.drafts}
        self.llm: Any = LLM(
            str(args.model),
            additional_config={"kv_policy": "full"},
            dtype=args.dtype or ("float32" if on_cpu() else "auto"),
            enforce_eager=on_cpu(),
            max_model_len=max(args.lengths) + ROOM,
            max_num_seqs=8,
            disable_log_stats=False,
            **args.engine_args,
            **drafts,
        )

    def answer(self, prompts: Sequence[list[int]], task: str) -> list[list[int]]:
        """Greedy tokens."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        is_text = task == "text"
        of_demo = TEXT_TOKENS if is_text else ANSWER_TOKENS
        tokens = TASKS[task].max_tokens if task in TASKS else of_demo
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=is_text)
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def row(
    policy: str, where: tuple[str, int], found: Counter[str], depths: int, same: int, n: int
) -> dict[str, Any]:
    """Shares of what was drafted, and how many of n answers are those without drafts.

    where: task and length. found: as `Server.counted`. depths: drafts of a step.
    """
    steps = found["drafts"]
    return {
        "policy": policy,
        "task": where[0],
        "length": where[1],
        "steps": steps,
        "accepted": round(found["accepted_tokens"] / max(found["draft_tokens"], 1), 4),
        "accepted_at_depth": [round(found[f"depth {d}"] / max(steps, 1), 4) for d in range(depths)],
        "tokens_a_step": round(1 + found["accepted_tokens"] / max(steps, 1), 3),
        "same_answers": same,
        "answers": n,
    }


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.answers.own_drafts")
    parser.add_argument("--model", type=Path, default=DEMO)
    policies = ["fier-32", "fier-64", "fier-128", "fier-256"]
    parser.add_argument("--policies", nargs="+", default=policies)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--count", type=int, default=16, help="prompts of each length and task")
    tasks = ["lookup", "text"]
    known = [*tasks, *sorted(TASKS)]
    parser.add_argument("--tasks", nargs="+", choices=known, default=tasks, metavar="TASK")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--dtype", help="default: the checkpoint's, on a CPU float32")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="of vLLM's LLM, as JSON")
    parser.add_argument("--out", required=True, metavar="NAME")
    args = parser.parse_args(argv)
    prepare_environment()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    asked: dict[tuple[str, int], list[list[int]]] = {}
    for length in args.lengths:
        if set(args.tasks) - set(TASKS):
            of_demo = prompts_of(tokenizer, length, args.count)
            asked |= {(task, length): x for task, x in of_demo.items() if task in args.tasks}
        for task in (task for task in args.tasks if task in TASKS):
            asked[task, length] = asked_of(tokenizer, task, length, args.count)
    server = Server(args, None)
    without = {where: server.answer(prompts, where[0]) for where, prompts in asked.items()}
    server.close()
    rows: list[dict[str, Any]] = []
    what = f"How many of {args.drafts} drafts a step {args.model.name} accepts of its own."
    head = about(what, command_line("benchmarks.answers.own_drafts", argv))
    for policy in args.policies:
        server = Server(args, policy)
        for where, prompts in asked.items():
            before = server.counted()
            answers = server.answer(prompts, where[0])
            n = len(answers)
            same = sum(a == b for a, b in zip(answers, without[where], strict=True))
            rows.append(row(policy, where, server.counted() - before, args.drafts, same, n))
            print(rows[-1])
            write_json(RESULTS / "answers" / f"{args.out}.json", {"about": head, "rows": rows})
        server.close()


if __name__ == "__main__":
    main(sys.argv[1:])
