"""Tokens/s of requests that decode at once, with and without drafts, on a real checkpoint.

    python -m benchmarks.engine.own_drafts --model DIR --batches 16x30000 --out NAME.json \\
        --servers stock fier-2048 full/fier-256x4 full/ngramx4 fier-2048/fier-256x4

A server is `stock` or a policy, and maybe `/`, what drafts, and `x` and how many tokens it drafts:
a policy by which the model reads its own cache, or `ngram`. Every server gets the same prompts, of
the tasks that `vllm-kvx evaluate` generates. They are in the prefix cache before the clock starts.
`tokens_per_s` is from all requests at once to the last token of the last one, and so counts what it
takes to send and look up the prompts; `decode_tokens_per_s` is from the first token of the last
request on. Answers are greedy and go on to `--tokens`; how many are those of `stock`, token for
token, is counted, and how far they agree. The file is written again after each server, and a run
that finds it goes on with the servers that it lacks or that failed; the exit status is 1 while
there are such.

With `--profile` each server's engine runs in one process with its client, which may cost a little,
and some steps in which all requests decode are recorded (``common.decode_steps``).
"""

import argparse
import json
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.about import about, command_line, gpu
from benchmarks.common.decode_steps import most_tokens, profiled
from benchmarks.common.drafts import DraftingServer
from benchmarks.common.files import write_json
from benchmarks.common.names import STOCK, served
from vllm_kvx.tools.engine import last_line, on_cpu, prepare_environment

# By the text of a batch, token ids of its prompts; and the answers to them.
Prompts = Mapping[str, Sequence[tuple[int, ...]]]
Answers = dict[str, list[list[int]]]

TASKS = ("niah_multivalue", "several_words", "niah_multikey_1", "code_lookup")

# What servers of one file have in common, beside the model.
SETTINGS = ("batches", "tokens", "repeats", "memory", "profile", "eager")

# Of a profile, what is printed.
TOLD = ("step_ms", "tokens", "profiled_step_ms", "device_busy_ms", "parts")


def options_of(server: str, eager: bool) -> dict[str, Any]:
    """What its name says to vLLM."""
    policy, _, drafts = server.partition("/")
    options: dict[str, Any] = {"enforce_eager": eager}
    if policy != STOCK:
        options["additional_config"] = {"kv_policy": served(policy)}
    if drafts:
        method, _, count = drafts.rpartition("x")
        spec: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": 4}
        if method != "ngram":
            spec = {"method": "kvx", "policy": method, "cache_to_weights": 0}
        options["speculative_config"] = spec | {"num_speculative_tokens": int(count)}
    return options


def drafts_of(server: str) -> int:
    """The most tokens that are drafted for a request in a step."""
    _, _, drafts = server.partition("/")
    return int(drafts.rpartition("x")[2]) if drafts else 0


def agree(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two answers have in common at their beginning."""
    pairs = zip(tokens, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(others)))


class Server(DraftingServer):
    """An engine by its name."""

    def __init__(self, args: argparse.Namespace, name: str, room: int) -> None:
        from vllm import LLM

        began = time.monotonic()
        self.llm: Any = LLM(
            str(args.model),
            dtype="float32" if on_cpu() else "auto",
            max_model_len=room,
            max_num_seqs=64,
            enable_prefix_caching=True,
            disable_log_stats=False,
            **({} if on_cpu() else {"gpu_memory_utilization": args.memory}),
            **options_of(name, args.eager or on_cpu()),
        )
        self.start_s = round(time.monotonic() - began, 1)

    def answer(
        self, prompts: Sequence[tuple[int, ...]], tokens: int
    ) -> tuple[list[list[int]], float]:
        """Greedy tokens, and the seconds from the last request's first token to the last token."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        inputs = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        first = max(output.metrics.first_token_ts for output in outputs)
        last = max(output.metrics.last_token_ts for output in outputs)
        return [list(output.outputs[0].token_ids) for output in outputs], last - first


def measure(
    server: Server, prompts: Sequence[tuple[int, ...]], args: argparse.Namespace
) -> tuple[dict[str, Any], list[list[int]]]:
    """Tokens/s of a batch, what was accepted, and the answers of the last repetition."""
    server.answer(prompts, 2)  # what prefix caching keeps, and what the first steps set up
    before, answers = server.counted(), list[list[int]]()
    seconds, decoding = list[float](), list[float]()
    for _ in range(args.repeats):
        began = time.monotonic()
        answers, decoded = server.answer(prompts, args.tokens)
        seconds.append(time.monotonic() - began)
        decoding.append(decoded)
    found = server.counted() - before
    count = len(prompts)
    row: dict[str, Any] = {
        "tokens_per_s": round(count * args.tokens / statistics.median(seconds), 1),
        "decode_tokens_per_s": round(count * (args.tokens - 1) / statistics.median(decoding), 1),
        "seconds": [round(each, 3) for each in seconds],
        "decode_seconds": [round(each, 3) for each in decoding],
    }
    if found["drafts"]:
        row["accepted"] = round(found["accepted_tokens"] / found["draft_tokens"], 4)
        row["tokens_a_step"] = round(1 + found["accepted_tokens"] / found["drafts"], 3)
    return row, answers


def run(
    args: argparse.Namespace, name: str, batches: Prompts, room: int
) -> tuple[dict[str, Any], Answers]:
    """A server's figures, by batch, and what it answered."""
    server = Server(args, name, room)
    entry: dict[str, Any] = {"start_s": server.start_s}
    answers: Answers = {}
    try:
        for text, prompts in batches.items():
            entry[text], answers[text] = measure(server, prompts, args)
            if args.profile:
                entry[text]["profile"] = profiled(server.llm, prompts, drafts_of(name))
    finally:
        # The next server needs the memory, whatever this one came to.
        server.close()
    return entry, answers


def run_alone(
    args: argparse.Namespace, name: str, batches: Prompts, room: int
) -> tuple[dict[str, Any], Answers]:
    """The same in a process of its own, whose end frees the device's memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run, args, name, batches, room).result()


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.engine.own_drafts")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--servers", nargs="+", required=True)
    parser.add_argument("--batches", nargs="+", default=["16x30000"], help="REQUESTSxTOKENS")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.85, help="share of the GPU's")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--profile", action="store_true", help="records some steps of each server")
    parser.add_argument(
        "--time-limit", type=float, help="seconds, after which no server is started"
    )
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    for server in args.servers:
        _, drafts, what = server.partition("/")
        if drafts and not re.fullmatch(r".+x[1-9]\d*", what):
            parser.error(
                f"--servers {server}: behind / stands what drafts, x and how many, as ngramx4"
            )
    if args.tokens < 2 or args.repeats < 1:
        parser.error("--tokens must be at least 2, --repeats at least 1")
    return args


def begun(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """The results file so far; raises SystemExit if it was made otherwise."""
    what = f"Tokens/s of requests that decode at once on {args.model.name}, by what drafts."
    content: dict[str, Any] = {
        "about": about(what, command_line("benchmarks.engine.own_drafts", argv), args.commit),
        "gpu": None if on_cpu() else gpu(),
        "settings": {key: getattr(args, key) for key in SETTINGS} | {"model": args.model.name},
        "servers": {},
        "answers_of": None,
        "answers": {},
    }
    if args.out.exists():
        earlier = json.loads(args.out.read_text(encoding="utf-8"))
        if any(earlier.get(key) != content[key] for key in ("gpu", "settings")):
            raise SystemExit(f"{args.out} was made with other settings: name another --out")
        content |= {key: earlier[key] for key in ("servers", "answers_of", "answers")}
    return content


def add(content: dict[str, Any], name: str, entry: dict[str, Any], answers: Answers) -> None:
    """Adds a server's figures, and how far its answers are those of the first that answered."""
    if answers and content["answers_of"] is None:
        content["answers_of"] = name
    for text, tokens in answers.items():
        first = content["answers"].setdefault(text, [" ".join(map(str, row)) for row in tokens])
        stock = [list(map(int, row.split())) for row in first]
        entry[text]["same_answers"] = sum(map(list.__eq__, tokens, stock))
        entry[text]["agree_for"] = [agree(a, b) for a, b in zip(tokens, stock, strict=True)]
    content["servers"][name] = entry


def main(argv: Sequence[str]) -> int:
    began, longest = time.monotonic(), 0.0
    args = parse_args(argv)
    prepare_environment()
    if args.profile:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    content = begun(args, argv)
    servers = content["servers"]
    missing = [name for name in args.servers if "error" in servers.get(name, {"error": ""})]
    if not missing:
        print(f"{args.out} has all of them", flush=True)
        return 0
    from transformers import AutoTokenizer

    from vllm_kvx.tools.tasks.prompts import fitted
    from vllm_kvx.tools.tasks.table import TASKS as KNOWN

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    batches = {}
    for text in args.batches:
        requests, length = map(int, text.split("x"))
        batches[text] = [
            fitted(KNOWN[TASKS[i % len(TASKS)]], f"{i}", length, tokenizer).token_ids
            for i in range(requests)
        ]
    most = max(map(drafts_of, args.servers))
    tokens = max(args.tokens, most_tokens(most) if args.profile else 0)
    room = max(len(prompt) for prompts in batches.values() for prompt in prompts) + tokens + 8
    well = True
    for name in missing:
        start = time.monotonic()
        if args.time_limit and start - began + longest > args.time_limit:
            print(f"{name}: no time left", flush=True)
            return 1
        entry: dict[str, Any] = {}
        answers: Answers = {}
        try:
            entry, answers = (run_alone if args.profile else run)(args, name, batches, room)
        except Exception as error:  # the other servers' figures stay
            entry["error"] = last_line(error)
            print(name, entry["error"], flush=True)
            well = False
        longest = max(longest, time.monotonic() - start)
        add(content, name, entry, answers)
        write_json(args.out, content)
        for text in answers:
            row = entry[text]
            told = {key: value for key, value in row.items() if key != "profile"}
            told |= {key: row["profile"][key] for key in TOLD if args.profile}
            print(name, text, told, flush=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
