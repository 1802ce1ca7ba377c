"""Serves the demo checkpoint on CPU, asks it a long question twice, and shows what was saved.

Run it by `bash deploy/demo.sh`, which sets up what it needs.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import httpx
from openai import OpenAI
from tokenizers import Tokenizer

from benchmarks.checkpoint.prompts import QUESTION, make_prompt
from benchmarks.common.server import CHECKPOINT, ServerError, cpu_environment, serving
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.policy.spec import parse_policy, servable

MODEL = "lookup-8l"
FULL = "full"
MAX_MODEL_LEN = 4096
ANSWER_TOKENS = 6
# Long enough that the request is still running when its blocks are counted, after which it is
# aborted: steps take about 2 ms.
HOLD_TOKENS = 2048
# Steps after a request's first token by which its blocks have been told to whoever counts them.
TOLD_AFTER = 8
# The server answers with what it read up to 0.25 s ago.
STALE_S = 0.3
# Blocks of two answers are compared where one is at most this many tokens longer than the other; on
# a busy machine a request may be kept waiting while the other goes on.
TOKENS_APART = 32
COUNTS = 10


class DemoError(RuntimeError):
    """What is shown could not be measured."""


@dataclass
class Run:
    """One policy's answer and what it took, as the server counted it.

    read, held: entries that decode steps under retrieval read, and could have read.
    """

    policy: str
    answer: str
    layer_tokens: int
    seconds: float
    read: int
    held: int


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="deploy/demo.sh", description="Asks one long question under a KV policy and in full."
    )
    parser.add_argument("--policy", default="speed-4", help="KV policy (default: speed-4)")
    parser.add_argument("--tokens", type=int, default=1500, help="prompt length (default: 1500)")
    parser.add_argument("--seed", type=int, default=7, help="which document (default: 7)")
    args = parser.parse_args()
    try:
        # As the server's counters name it.
        args.policy = str(parse_policy(args.policy))
    except PolicyError as error:
        parser.error(f"--policy: {error}")
    if args.policy == FULL:
        parser.error("--policy: full is what the policy is compared with; name another")
    if not 128 <= args.tokens <= MAX_MODEL_LEN - HOLD_TOKENS:
        parser.error(f"--tokens: choose 128 .. {MAX_MODEL_LEN - HOLD_TOKENS}")
    return args


def main() -> int:
    args = parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    # Without transformers, whose import takes seconds.
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    # The first word of an answer comes with the prompt; decode steps are to look something up too.
    words = 3 if parse_policy(args.policy).retrieve else 1
    prompt, expected = make_prompt(args.seed, args.tokens, tokenizer, words)
    flags = [
        str(CHECKPOINT),
        *("--served-model-name", MODEL),
        *("--kv-policy", servable(parse_policy(args.policy))),
        *("--max-model-len", str(MAX_MODEL_LEN)),
        *("--dtype", "float32"),
        *("--block-size", "32"),
        "--enforce-eager",
    ]
    say(f"Starting vllm serve tests/checkpoints/{MODEL} --kv-policy {args.policy} on CPU (~30 s)")
    with tempfile.TemporaryDirectory(prefix="kvx-demo-") as directory:
        log = Path(directory) / "server.log"
        try:
            with serving(flags, log, cpu_environment()) as url:
                client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
                show_document(prompt, expected, args.tokens)
                # Another document first: it takes what only a first request costs.
                other, _ = make_prompt(args.seed + 1, args.tokens, tokenizer, words)
                for question in (other, prompt):
                    runs = [ask(client, url, question, policy) for policy in (args.policy, FULL)]
                blocks = blocks_held(client, url, prompt, (args.policy, FULL))
                layout = status(url)["layout"]
        except (DemoError, ServerError) as error:
            say(str(error))
            return 1
    return report(runs, blocks, expected, layout)


def ask(client: OpenAI, url: str, prompt: str, policy: str) -> Run:
    before = counters(url, policy)
    begin, seconds, answer = time.perf_counter(), 0.0, ""
    for chunk in stream(client, prompt, policy, max_tokens=ANSWER_TOKENS):
        seconds = seconds or time.perf_counter() - begin
        answer += chunk.choices[0].text
    after = counters(url, policy)

    def moved(field: str) -> int:
        return after[field] - before.get(field, 0)

    return Run(
        policy=policy,
        answer=answer.strip(),
        layer_tokens=moved("layer_tokens_computed"),
        seconds=seconds,
        read=moved("entries_read"),
        held=moved("entries_held_in_decode"),
    )


def blocks_held(client: OpenAI, url: str, prompt: str, policies: Sequence[str]) -> list[int] | None:
    """KV blocks of one request under each policy, counted at one moment of their long answers.

    Together they have answers of one length, give or take a few tokens: where one of them was kept
    waiting, both are asked for again. None where the machine is too busy for that.
    """
    for _ in range(COUNTS):
        time.sleep(STALE_S)
        with ThreadPoolExecutor() as threads:
            answers = [LongAnswer(client, prompt, policy) for policy in policies]
            reading = [threads.submit(answer.read) for answer in answers]
            try:
                while min(answer.tokens for answer in answers) < TOLD_AFTER:
                    if any(future.done() for future in reading):
                        break
                    time.sleep(0.001)
                tokens = [answer.tokens for answer in answers]
                now = status(url)["counters"]
            finally:
                for answer in answers:
                    answer.enough.set()
        for future in reading:
            future.result()
        counted = [now.get(policy, {}).get("blocks_held", 0) for policy in policies]
        if all(counted) and max(tokens) - min(tokens) <= TOKENS_APART:
            return counted
    return None


class LongAnswer:
    """An answer that goes on until it is enough; `tokens`, how long it is by now."""

    def __init__(self, client: OpenAI, prompt: str, policy: str) -> None:
        self.ask = partial(stream, client, prompt, policy, HOLD_TOKENS, ignore_eos=True)
        self.tokens = 0
        self.enough = Event()

    def read(self) -> None:
        with self.ask() as answer:
            for _ in answer:
                self.tokens += 1
                if self.enough.is_set():
                    return


def stream(client: OpenAI, prompt: str, policy: str, max_tokens: int, **options: Any) -> Any:
    return client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        # With a salt of its own: what one policy computed, the other shall not find in the cache.
        extra_body={"vllm_xargs": {"kv_policy": policy}, "cache_salt": policy, **options},
    )


def counters(url: str, policy: str) -> dict[str, int]:
    time.sleep(STALE_S)
    return status(url)["counters"].get(policy, {})


def status(url: str) -> dict[str, Any]:
    """What the server tells of now: where it is busy, it may answer with what it read before."""
    for _ in range(20):
        told: dict[str, Any] = (
            httpx.get(f"{url}/v1/kv_policy", timeout=30).raise_for_status().json()
        )
        if told["current"]:
            return told
        time.sleep(STALE_S)
    raise DemoError("The server is too busy to tell what it has counted.")


def show_document(prompt: str, expected: str, tokens: int) -> None:
    """The question, and the document around the line that answers it."""
    *lines, question = prompt.splitlines()
    key = question.removeprefix(QUESTION).strip()
    at = lines.index(f"- {key}{expected}")
    say(f"\nA document of {tokens:,} tokens, {len(lines)} lines; the answer is in line {at + 1}:\n")
    for i in range(max(at - 3, 0), min(at + 4, len(lines))):
        line = lines[i] if len(lines[i]) <= 84 else f"{lines[i][:81]}..."
        say(f"  {i + 1:>4} {'>' if i == at else ' '} {line}")
    say(f"\n{question}")


def report(runs: list[Run], blocks: list[int] | None, expected: str, layout: dict[str, Any]) -> int:
    """Prints answers and savings; 0 if every answer is right."""
    policy = runs[0]
    right = {run.policy: run.answer == expected.strip() for run in runs}
    rows = [("", *right, "saved")]
    rows.append(("answer", *(run.answer for run in runs), ""))
    rows.append(("right", *("yes" if ok else "NO" for ok in right.values()), ""))
    spent = [run.layer_tokens for run in runs]
    counted = [("layer-tokens computed", spent), *([("KV blocks held", blocks)] if blocks else [])]
    for label, (some, whole) in counted:
        rows.append((label, f"{some:,}", f"{whole:,}", f"{1 - some / whole:.1%}"))
    if policy.held:
        saved = f"{1 - policy.read / policy.held:.1%}"
        reads = ("KV entries that decode steps read", f"{policy.read:,}", f"{policy.held:,}", saved)
        rows.append(reads)
    pool, stock = layout["pool_prompt_tokens"], layout["stock_pool_tokens"]
    rows.append(("prompt tokens the KV pool holds", f"{pool:,}", f"{stock:,}", ""))
    rows.append(("seconds to first token *", *(f"{run.seconds:.2f}" for run in runs), ""))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    say("")
    for label, *cells in rows:
        cells = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        say(f"  {label.ljust(widths[0])}   {'   '.join(cells)}".rstrip())
    say("\n  * Triton's interpreter on a CPU: this shows that it runs, not how fast a GPU is.\n")
    if not blocks:
        say("This machine is too busy to count the KV blocks of two answers at one moment.\n")
    say("Both answers are right." if all(right.values()) else f"Expected:{expected}")
    return 0 if all(right.values()) else 1


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
