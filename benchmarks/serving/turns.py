"""Sessions of many turns at once: what the prefix cache gives stock vLLM and KV policies.

    python -m benchmarks.serving.turns --policy stock --out DIR
    python -m benchmarks.serving.turns --policy fastkv:tsp_layer=15 --out DIR \\
        --requests fastkv:tsp_layer=15 full
    python -m benchmarks.serving.turns --policy fastkv:tsp_layer=15 --share off --out DIR
    python -m benchmarks.serving.turns --out DIR --summary NAME

A command starts one engine, serves its sessions and adds a file to DIR; `--summary` writes
benchmarks/results/serving/NAME.json and NAME.png of what DIR holds. A session's prompts grow evenly
from `--first` to `--last` tokens: turn n + 1 is turn n's prompt, its answer, and new tokens.
Sessions run side by side, each asks on when it is answered (`--think` seconds later on average),
and `--seed` makes all that is random. `--share off` only times prompts that nobody saw before.

The client is this module's own, on vLLM's `AsyncLLM`, and sends token ids; times are vLLM's own.
vLLM's multi-turn benchmark and AIPerf send chats as text, for which the shapes of random weights
measured here have no tokenizer: an answer's text would come back as other and more tokens.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.common.about import about, check_plugin, command_line
from benchmarks.common.files import RESULTS, write_json
from benchmarks.common.names import STOCK, served
from benchmarks.engine.compare import prepare_model
from benchmarks.engine.shapes import SHAPES
from benchmarks.serving.turns_figures import Load, Turn, curves, summarise
from vllm_kvx.tools.plots import draw


@dataclass
class Counters:
    """vLLM's own totals, as a stat logger of it (duck-typed) sees them. Tokens and requests."""

    queries: int = 0
    hits: int = 0
    preemptions: int = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        if scheduler_stats is not None:
            self.queries += scheduler_stats.prefix_cache_stats.queries
            self.hits += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Nothing to log; vLLM calls it, and the next two."""

    def log(self) -> None: ...

    def record_sleep_state(self, *_: Any) -> None: ...


class Server:
    """A running engine and the requests it gets."""

    def __init__(self, engine: Any, counters: Counters, load: Load, vocab: int) -> None:
        self._engine, self._counters, self._load, self._vocab = engine, counters, load, vocab
        self._ids = count()

    async def ask(self, prompt: list[int], answer: int, policy: str | None) -> Any:
        """The finished output of one request: exactly `answer` tokens, greedily."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=answer,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_policy": served(policy)} if policy else None,
        )
        inputs = TokensPrompt(prompt_token_ids=prompt)
        name = str(next(self._ids))
        (output,) = [each async for each in self._engine.generate(inputs, params, name)]
        if len(output.outputs[0].token_ids) != answer:
            raise RuntimeError(f"a prompt of {len(prompt)} tokens was not answered in full")
        return output

    async def cold(self, policy: str | None) -> dict[str, list[float]]:
        """TTFT in ms of prompts nobody saw before, one at a time, by length."""
        load, found = self._load, {}
        for length in sorted({load.first, load.last}):
            times = []
            for repeat in range(load.repeats + 1):  # The first one warms up.
                prompt = load.tokens(self._vocab, length, length, repeat)
                output = await self.ask(prompt, 1, policy)
                if output.num_cached_tokens:
                    raise RuntimeError(
                        f"{output.num_cached_tokens} tokens of a new prompt are cached"
                    )
                times.append(1e3 * output.metrics.first_token_latency)
            found[str(length)] = [round(ms, 3) for ms in times[1:]]
        return found

    async def sessions(self, policy: str | None, deadline: float) -> dict[str, Any]:
        """All sessions side by side. None begins a turn after the deadline, in monotonic time."""
        before, stats = asdict(self._counters), await self._policy_stats()
        began, turns = time.monotonic(), list[Turn]()
        one = (self._session(i, policy, turns, began, deadline) for i in range(self._load.sessions))
        await asyncio.gather(*one)
        seconds = time.monotonic() - began
        now, later = asdict(self._counters), await self._policy_stats()
        return {
            "complete": len(turns) == self._load.sessions * self._load.turns,
            "seconds": round(seconds, 3),
            "counters": {name: now[name] - before[name] for name in now},
            "policies": {
                name: added
                for name in later
                if (added := _added(later[name], stats.get(name, {}))).get("requests")
            },
            "turns": [asdict(turn) for turn in turns],
        }

    async def _session(
        self, session: int, policy: str | None, turns: list[Turn], began: float, deadline: float
    ) -> None:
        load, prompt = self._load, list[int]()
        pauses = random.Random(f"{load.seed}/{session}")
        for turn in range(load.turns):
            if turn and load.think:
                await asyncio.sleep(pauses.expovariate(1 / load.think))
            if time.monotonic() > deadline:
                return
            new = load.prompt_len(turn) - len(prompt)
            prompt = [*prompt, *load.tokens(self._vocab, new, 0, session, turn)]
            output = await self.ask(prompt, load.answer, policy)
            times = output.metrics
            decode = (times.last_token_ts - times.first_token_ts) / max(1, load.answer - 1)
            turns.append(
                Turn(
                    session,
                    turn,
                    len(prompt),
                    output.num_cached_tokens or 0,
                    round(1e3 * times.first_token_latency, 3),
                    round(1e3 * decode, 4),
                    times.num_preemptions,
                    round(time.monotonic() - began, 3),
                )
            )
            prompt += output.outputs[0].token_ids

    async def forget(self) -> None:
        """Empties the prefix cache."""
        if not await self._engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache is still in use")

    async def _policy_stats(self) -> dict[str, Any]:
        """vllm-kvx's prefix counters by policy; none in stock vLLM."""
        if not self._engine.vllm_config.additional_config.get("kv_policy"):
            return {}
        stats = (await self._engine.collective_rpc("kv_policy_stats"))[0]["policies"]
        return {name: _prefix_counters(each) for name, each in stats.items()}


def _prefix_counters(stats: dict[str, Any]) -> dict[str, float]:
    wanted = ("requests", "kv_bytes_moved")
    return {key: n for key, n in stats.items() if key in wanted or key.startswith("prefix_")}


def _added(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {key: value - before.get(key, 0) for key, value in now.items()}


async def measure(args: argparse.Namespace, model: dict[str, Any], vocab: int, path: Path) -> None:
    """Starts the engine of `args` and runs its requests; rewrites the file after each policy."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    began, load, settings = time.monotonic(), args.load, dict(args.config)
    if args.policy != STOCK:
        check_plugin()
        settings["kv_policy"] = served(args.policy)
        if args.share == "off":
            settings["kv_share"] = "off"
    options = engine_options(args, load)
    counters = Counters()
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(**model, **options, additional_config=settings),
        stat_loggers=[lambda *_: counters],  # type: ignore[list-item]
    )
    config = engine.vllm_config
    result: dict[str, Any] = {
        "about": head_of(args),
        "model": {"name": args.model, "dummy_weights": "load_format" in model},
        "load": asdict(load),
        "engine": options,
        "policy": args.policy,
        "share": args.share,
        "config": args.config,
        "start_s": round(time.monotonic() - began, 1),
        "requests": {},
    }
    try:
        server = Server(engine, counters, load, vocab)
        for policy in args.requests or [args.policy]:
            named = None if policy == args.policy else policy
            await server.forget()
            report: dict[str, Any] = {"cold": await server.cold(named)}
            if args.share == "on":
                await server.forget()
                report |= await server.sessions(named, began + args.time_limit)
            result["requests"][policy] = report
            # Known once it has run: how many blocks this memory is.
            result["num_blocks"] = config.cache_config.num_gpu_blocks
            result["block_size"] = config.cache_config.block_size
            write_json(path, result)
            print(f"{policy}, sharing {args.share}: {time.monotonic() - began:.0f} s", flush=True)
    finally:
        engine.shutdown()


def engine_options(args: argparse.Namespace, load: Load) -> dict[str, Any]:
    """What every engine is started with."""
    return {
        "dtype": args.dtype,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "max_model_len": load.last + load.answer,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_num_seqs": max(64, load.sessions),
        "disable_log_stats": False,
        "seed": load.seed,
        **args.engine_args,
    }


def head_of(args: argparse.Namespace) -> dict[str, Any]:
    what = "Sessions of many turns side by side, and what the prefix cache gives them."
    return about(what, command_line("benchmarks.serving.turns", sys.argv[1:]), args.commit)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.serving.turns", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="a JSON for each engine")
    add("--summary", metavar="NAME", help="only write results of what is in DIR")
    add("--policy", help=f"the server's: {STOCK}, or a KV policy")
    add("--requests", nargs="+", metavar="POLICY", help="of the requests; default: the server's")
    add("--share", choices=("on", "off"), default="on", help="off: kv_share=off, cold prompts only")
    add("--config", type=json.loads, default={}, help="JSON: further keys of additional_config")
    add("--model", default="llama-3.1-8b", help=f"{', '.join(SHAPES)} (dummy weights), or a folder")
    add("--sessions", type=int, default=16)
    add("--turns", type=int, default=20)
    add("--first", type=int, default=8192, help="tokens of the first turn's prompt")
    add("--last", type=int, default=65536, help="tokens of the last turn's prompt")
    add("--answer", type=int, default=128, help="tokens of each answer")
    add("--think", type=float, default=0.0, help="mean seconds between an answer and the next turn")
    add("--repeats", type=int, default=5, help="cold prompts of each length")
    add("--seed", type=int, default=0)
    add("--time-limit", type=float, default=560, help="seconds, after which no turn begins")
    add("--commit", help="what is measured, where the tree is no git checkout")
    add("--dtype", default="bfloat16")
    add("--max-num-batched-tokens", type=int, default=8192, help="prefill chunk")
    add("--engine-args", type=json.loads, default={}, help="JSON: further engine arguments")
    args = parser.parse_args(argv)
    if not args.summary and not args.policy:
        parser.error("give --policy or --summary")
    if args.policy == STOCK and (args.requests or args.share == "off" or args.config):
        parser.error(f"{STOCK} knows no policies: no --requests, --share off or --config")
    try:
        args.load = Load(**{key.name: getattr(args, key.name) for key in fields(Load)})
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: list[str]) -> None:
    args = parse_args(argv)
    if args.summary:
        files = sorted(args.out.glob("*.json"))
        result = summarise(json.loads(file.read_text(encoding="utf-8")) for file in files)
        path = RESULTS / "serving" / f"{args.summary}.json"
        write_json(path, result)
        print(draw(path.with_suffix(".png"), curves, result))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.+-]+", "_", args.policy) + ("-off" if args.share == "off" else "")
    with tempfile.TemporaryDirectory() as folder:
        shape, model = prepare_model(args.model, Path(folder))
        asyncio.run(measure(args, model, shape.vocab, args.out / f"{name}.json"))


if __name__ == "__main__":
    main(sys.argv[1:])
