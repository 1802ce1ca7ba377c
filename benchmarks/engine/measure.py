"""One engine, started once in a process of its own, and all that is measured on it.

`python -m benchmarks.engine.measure SPEC.json` is started by `benchmarks.engine.compare`. It
rewrites the report file after every case. Times are vLLM's own: per request from
`RequestOutput.metrics`, per step from the statistics that the engine core sends with each step's
output.
"""

import json
import math
import statistics
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from benchmarks.common.about import check_plugin
from benchmarks.common.files import write_json
from benchmarks.common.names import served
from benchmarks.engine.ideal import Case
from vllm_kvx.tools.ideal.work import work_of

# Steps right after the last prefill may still wait for what was scheduled beside it.
_SETTLE_STEPS = 3
_LONGEST_WARM_UP = 131_072


@dataclass
class Step:
    """One engine step: the intervals since the previous token, new prompts done, CUDA graph."""

    intervals: list[float]
    first_tokens: int
    tokens: int | None
    graph: str | None

    @property
    def is_decode(self) -> bool:
        """Every token of the step is a decode token."""
        some = bool(self.intervals) and not self.first_tokens
        return some and self.tokens in (None, len(self.intervals))


@dataclass
class StepRecorder:
    """A stat logger of vLLM (duck-typed: this module imports no vLLM) that keeps each step."""

    steps: list[Step] = field(default_factory=list)

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        graph = scheduler_stats.cudagraph_stats if scheduler_stats is not None else None
        if iteration_stats is None:
            return
        self.steps.append(
            Step(
                intervals=list(iteration_stats.inter_token_latencies_iter),
                first_tokens=len(iteration_stats.time_to_first_tokens_iter),
                tokens=graph.num_unpadded_tokens if graph is not None else None,
                graph=graph.runtime_mode.rpartition(".")[2] if graph is not None else None,
            )
        )

    def log(self) -> None:
        """Nothing to log; vLLM calls it."""

    def graphs(self) -> dict[str, int]:
        """How many pure-decode steps ran in each CUDA graph mode."""
        return dict(Counter(str(step.graph) for step in self.steps if step.is_decode))


class Bench:
    """The engine of one spec and its measurements."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.cases = [Case.parse(text) for text in spec["cases"]]
        self.report: dict[str, Any] = {"status": "starting", "cases": {}}
        self._latency: dict[tuple[int, str | None], dict[str, Any]] = {}

    def run(self) -> None:
        began = time.monotonic()
        try:
            self._start()
            self.report["start_s"] = round(time.monotonic() - began, 1)
            self.report["resolved"] = self._resolved()
            self.report["pool"] = self._pool()
        except Exception:
            self.report["error"] = last_lines()
            self._save("failed")
            raise
        for case in self.cases:
            self._save(str(case))
            start = time.monotonic()
            try:
                result = getattr(self, f"_measure_{case.kind}")(case)
            except Exception:
                result = {"error": last_lines()}
            result["took_s"] = round(time.monotonic() - start, 1)
            self.report["cases"][str(case)] = result
        self._save("done")

    def _save(self, status: str) -> None:
        self.report["status"] = status
        write_json(Path(self.spec["report"]), self.report)

    def _start(self) -> None:
        policy = self.spec["policy"]
        options = dict(self.spec["engine"])
        if policy is not None:
            check_plugin()
            layout = [served(name) for name in self.spec.get("layout") or ()]
            off = {"kv_disable": self.spec["disable"]} if self.spec.get("disable") else {}
            options["additional_config"] = {"kv_policy": served(policy), "kv_layout": layout, **off}
        from vllm import LLM

        self.llm = cast(Any, LLM(disable_log_stats=False, cudagraph_metrics=True, **options))
        self.recorder = StepRecorder()
        self.llm.llm_engine.logger_manager.stat_loggers.append(self.recorder)
        self.config = self.llm.llm_engine.vllm_config

    def _resolved(self) -> dict[str, Any]:
        """What vLLM made of the settings, and the versions it ran with."""
        import torch
        import triton
        import vllm

        compilation, scheduler = self.config.compilation_config, self.config.scheduler_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": sys.version.split()[0],
            "cudagraph_mode": str(compilation.cudagraph_mode).rpartition(".")[2],
            "async_scheduling": bool(scheduler.async_scheduling),
            "block_size": self.config.cache_config.block_size,
            "max_model_len": self.config.model_config.max_model_len,
            **self._retrieval(),
        }

    def _retrieval(self) -> dict[str, Any]:
        """Which ops retrieve, and from which length on; empty where none do."""
        if self.spec["policy"] in (None, "full"):
            return {}
        found = self.llm.collective_rpc("kv_policy_stats")[0].get("retrieval", {})
        names = {"score_ops": "retrieval_ops", "dense_below": "dense_below"}
        return {ours: found[theirs] for theirs, ours in names.items() if theirs in found}

    def _pool(self) -> dict[str, Any]:
        """Prompt tokens that the KV pool holds; `stock_tokens` without a policy, same memory."""
        cache = self.config.cache_config
        if self.spec["policy"] in (None, "full"):
            tokens = (cache.num_gpu_blocks - 1) * cache.block_size
            return {"num_blocks": cache.num_gpu_blocks, "tokens": tokens, "stock_tokens": tokens}
        layout = self.llm.collective_rpc("kv_policy_stats")[0]["layout"]
        return {
            "num_blocks": layout["num_blocks"],
            "tokens": layout["pool_prompt_tokens"],
            "stock_tokens": layout["stock_pool_tokens"],
            "groups": [{**g, "layers": len(g["layers"])} for g in layout["groups"]],
        }

    def _generate(
        self, case: Case, tokens: list[int], first: int = 0, lengths: list[int] | None = None
    ) -> list[Any]:
        """Runs one request per entry of `tokens`, its output length; gives their metrics.

        The prompts depend on seed, length and index only: every engine gets the same. `lengths`
        are theirs where the case's own is not meant.
        """
        lengths = lengths or [case.length] * len(tokens)
        import numpy as np
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        prompts, params = [], []
        for index, (count, length) in enumerate(zip(tokens, lengths, strict=True), first):
            rng = np.random.default_rng((self.spec["seed"], length, index))
            ids = rng.integers(0, self.spec["vocab"], length).tolist()
            prompts.append(TokensPrompt(prompt_token_ids=ids))
            sampling: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "detokenize": False}
            if case.policy:
                sampling["extra_args"] = {"kv_policy": served(case.policy)}
            params.append(SamplingParams(max_tokens=count, **sampling))
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        for output, count in zip(outputs, tokens, strict=True):
            got = len(output.outputs[0].token_ids)
            if got != count:
                raise RuntimeError(f"asked for {count} tokens, got {got}")
        return [output.metrics for output in outputs]

    def _requests_alone(self, case: Case) -> dict[str, Any]:
        """TTFT and TPOT of single requests; `ttft:N` and `tpot:N` share the same runs."""
        key = (case.length, case.policy)
        if key in self._latency:
            return self._latency[key]
        decodes = any(c.kind == "tpot" and (c.length, c.policy) == key for c in self.cases)
        count = self.spec["tokens"] if decodes else 1
        # A prompt of minutes would take as long again; what it compiles, a shorter one does, too.
        self._generate(case, [min(count, 8)], lengths=[min(case.length, _LONGEST_WARM_UP)])
        self.recorder.steps.clear()
        repeats = self.spec["repeats"] or (3 if case.length > 65536 else 5)
        before = self._policy_s()
        runs = [self._generate(case, [count], first=1 + i)[0] for i in range(repeats)]
        spent = [
            1e3 * (now - then) / repeats for now, then in zip(self._policy_s(), before, strict=True)
        ]
        result = {
            "ttft": [1e3 * m.first_token_latency for m in runs],
            "prefill": [1e3 * (m.first_token_ts - m.scheduled_ts) for m in runs],
            "tpot": [1e3 * (m.last_token_ts - m.first_token_ts) / max(1, count - 1) for m in runs],
            "graphs": self.recorder.graphs(),
            "retention_ms": round(spent[0], 3),
            "detector_ms": round(spent[1], 3),
            "sidecar_ms": round(spent[2], 3),
        }
        self._latency[key] = result
        return result

    def _measure_ttft(self, case: Case) -> dict[str, Any]:
        runs = self._requests_alone(case)
        prefill = summary(runs["prefill"])
        result = {**summary(runs["ttft"]), "prefill_ms": prefill["samples"]}
        if runs["retention_ms"]:
            result["retention_ms"] = runs["retention_ms"]
            result["retention_of_prefill"] = round(runs["retention_ms"] / prefill["median"], 5)
        if runs["detector_ms"]:
            result["detector_ms"] = runs["detector_ms"]
            result["detector_of_prefill"] = round(runs["detector_ms"] / prefill["median"], 5)
        if runs["sidecar_ms"]:
            result["sidecar_ms"] = runs["sidecar_ms"]
            result["sidecar_of_prefill"] = round(runs["sidecar_ms"] / prefill["median"], 5)
        return result

    def _policy_s(self) -> tuple[float, float, float]:
        """Device seconds so far, by the engine's clock.

        In saliency, detection, selection and compaction together; and of these in accumulating
        centrality and in the detector of the pivot. Last, in writing sidecars.
        """
        if self.spec["policy"] in (None, "full"):
            return 0.0, 0.0, 0.0
        stats = self.llm.collective_rpc("kv_policy_stats")[0]
        sidecars = stats.get("retrieval", {}).get("seconds_in_sidecar_writes", 0.0)
        return stats["seconds_in_retention"], stats["seconds_in_detector"], sidecars

    def _measure_tpot(self, case: Case) -> dict[str, Any]:
        runs = self._requests_alone(case)
        return {**summary(runs["tpot"]), "decode_graphs": runs["graphs"]}

    def _measure_itl(self, case: Case) -> dict[str, Any]:
        """Waits between two tokens of running requests while one long prompt comes in; the longest.

        Four short requests decode throughout.
        """
        chunks = -(-case.length // (self.spec["engine"]["max_num_batched_tokens"] // 2))
        tokens = [*[chunks + 16] * 4, 2]
        lengths = [*[512] * 4, case.length]
        self._generate(case, tokens, lengths=lengths)
        longest, during = [], list[float]()
        for first in range(1, 4):
            self.recorder.steps.clear()
            self._generate(case, tokens, first=first * 10, lengths=lengths)
            waits = [max(step.intervals) for step in self.recorder.steps if step.intervals]
            longest.append(1e3 * max(waits))
            during += [1e3 * wait for wait in waits_during(self.recorder.steps)]
        last = sorted(round(1e3 * wait, 2) for wait in waits)
        return {
            **summary(longest),
            "longest_waits_of_last_run_ms": last[-8:],
            # Every wait of every running request from the long prompt's arrival to its first token.
            "p50_ms": round(percentile(during, 50), 4),
            "p99_ms": round(percentile(during, 99), 4),
            "waits": len(during),
        }

    def _measure_decode(self, case: Case) -> dict[str, Any]:
        assert case.batch is not None
        if case.batch > self._largest_batch(case):
            raise ValueError(f"{case}: this engine runs {self._largest_batch(case)} at once")
        return self._decode_together(case, case.batch)

    def _measure_pool_decode(self, case: Case) -> dict[str, Any]:
        batch = self._largest_batch(case)
        if not batch:
            raise ValueError(f"{case}: the pool has no room for one prompt and its output")
        return self._decode_together(case, batch)

    def _largest_batch(self, case: Case) -> int:
        """The most requests that the pool holds, within max_num_seqs."""
        tokens = self._pool_tokens(case)
        most = min(self.spec["engine"]["max_num_seqs"], int(tokens // case.length))
        fitting = (batch for batch in range(most, 0, -1) if self._room(case, batch) <= tokens)
        return next(fitting, 0)

    def _pool_tokens(self, case: Case) -> float:
        """Prompt tokens that the pool holds, under the policy that the requests ask for.

        Raises:
            ValueError: the name leaves open how many entries stay.
        """
        pool: dict[str, float] = self.report["pool"]
        if case.policy is None:
            return pool["tokens"]
        layers = self.config.model_config.get_total_num_hidden_layers()
        work = work_of(case.policy, layers, case.length)
        if work is None:
            raise ValueError(f"{case}: how much the pool holds is not known by the name alone")
        own = work_of(self.spec["policy"], layers, case.length)
        if own is None:
            raise ValueError(f"{case}: how much the pool holds is not known by the server's name")
        # Not from `stock_tokens`, whose pages have no sidecar.
        return pool["tokens"] * sum(own.stored) / sum(work.stored)

    def _room(self, case: Case, batch: int) -> float:
        """Prompt tokens whose room in the pool a batch takes, outputs included.

        A generated token is stored in every layer, hence takes the room of tokens / stock_tokens
        prompt tokens. Each request may leave some blocks partly filled.
        """
        per_output = self._pool_tokens(case) / self.report["pool"]["stock_tokens"]
        room = batch * (case.length + 64) + per_output * sum(self._output_lengths(case, batch))
        return room + self._peak(case)

    def _peak(self, case: Case) -> float:
        """Prompt tokens' room that the last prompt takes besides, before retention drops some."""
        policy = case.policy or self.spec["policy"]
        layers = self.config.model_config.get_total_num_hidden_layers()
        work = work_of(policy, layers, case.length)
        if work is None:
            return 0
        made = sum(work.rows) + sum(work.projected)
        return (made / sum(work.stored) - 1) * case.length

    def _output_lengths(self, case: Case, batch: int) -> list[int]:
        """Output lengths such that the first request still decodes `steps` after the last starts.

        Prompts are served in order; while the later ones prefill, the earlier ones decode. With
        these lengths all end together, so no time goes to a shrinking batch.
        """
        chunk = self.spec["engine"]["max_num_batched_tokens"] - batch
        # A policy may take a step or two more for a prompt.
        chunks = -(-case.length // max(1, chunk)) + 2
        steps = self.spec["steps"] + _SETTLE_STEPS
        return [steps + (batch - 1 - index) * chunks for index in range(batch)]

    def _decode_together(self, case: Case, batch: int) -> dict[str, Any]:
        """Step times while the whole batch decodes: one run, a sample a step."""
        self.recorder.steps.clear()
        metrics = self._generate(case, self._output_lengths(case, batch))
        steps = [step for step in self.recorder.steps if step.is_decode]
        together = max((len(step.intervals) for step in steps), default=0)
        # In the last one requests end, and the next step is not under way beside it.
        settled = [step for step in steps if len(step.intervals) == together][_SETTLE_STEPS:-1]
        if len(settled) < self.spec["steps"] // 2:
            raise RuntimeError(f"only {len(settled)} steps with {together} of {batch} decoding")
        result = summary([1e3 * statistics.median(step.intervals) for step in settled])
        return {
            **result,
            "batch": together,
            "requests": batch,
            "pool_filled": round(self._room(case, batch) / self._pool_tokens(case), 3),
            "tokens_per_s": round(1e3 * together / result["median"], 2),
            "preemptions": sum(m.num_preemptions for m in metrics),
            "decode_graphs": dict(Counter(str(step.graph) for step in settled)),
        }


def waits_during(steps: list[Step]) -> list[float]:
    """The running requests' waits up to the step in which the last prompt's first token came."""
    end = max((i for i, step in enumerate(steps) if step.first_tokens), default=-1)
    return [wait for step in steps[: end + 1] for wait in step.intervals]


def summary(samples: list[float]) -> dict[str, Any]:
    """Samples in ms, their median, and their spread (max - min) / median."""
    median = statistics.median(samples)
    spread = (max(samples) - min(samples)) / median if median else 0.0
    return {
        "samples": [round(sample, 4) for sample in samples],
        "median": round(median, 4),
        "spread": round(spread, 4),
    }


def percentile(samples: list[float], percent: float) -> float:
    """The smallest sample that is not below `percent` of all samples."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def last_lines() -> list[str]:
    """The end of the current exception's traceback."""
    return traceback.format_exc().strip().splitlines()[-12:]


if __name__ == "__main__":
    Bench(json.loads(Path(sys.argv[1]).read_text())).run()
