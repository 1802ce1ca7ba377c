"""What `benchmarks.turns` measured as figures: by turn, by policy, and against stock vLLM."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STOCK = "stock"
# A turn whose hit is shorter than the prompt before it by more lost some of it to eviction: hits
# end at whole blocks, of 128 tokens where hidden states are kept, and before a window.
_SLACK = 256


@dataclass(frozen=True)
class Load:
    """What is asked for. Lengths are in tokens, `first` and `last` prompts'; `think` in seconds.

    Raises:
        ValueError: no session could run so.
    """

    sessions: int
    turns: int
    first: int
    last: int
    answer: int
    think: float
    repeats: int
    seed: int

    def __post_init__(self) -> None:
        if min(self.sessions, self.turns, self.first, self.answer, self.repeats) < 1:
            raise ValueError("sessions, turns, lengths and repeats are at least 1")
        if self.think < 0:
            raise ValueError("--think is at least 0 seconds")
        if self.turns > 1 and (self.last - self.first) // (self.turns - 1) <= self.answer:
            raise ValueError("prompts have to grow by more than an answer a turn")

    def prompt_len(self, turn: int) -> int:
        """Tokens of the prompt of a turn, counted from 0."""
        return self.first + (self.last - self.first) * turn // max(1, self.turns - 1)

    def tokens(self, vocab: int, amount: int, *place: int) -> list[int]:
        """Random tokens of a place of the load; the same in every run with this seed."""
        import numpy as np

        ids: list[int] = (
            np.random.default_rng((self.seed, *place)).integers(0, vocab, amount).tolist()
        )
        return ids


@dataclass(frozen=True)
class Turn:
    """One request. cached: tokens from the prefix cache. Times in ms; turns count from 0."""

    session: int
    turn: int
    prompt_len: int
    cached: int
    ttft: float
    tpot: float
    preemptions: int


def summarise(files: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """All engines of a folder side by side, and each against stock.

    Raises:
        ValueError: they had other loads or engines, or there is none.
    """
    files = list(files)
    same = ("model", "load", "engine")
    if not files:
        raise ValueError("no engine was measured")
    for key in same:
        if any(each[key] != files[0][key] for each in files):
            raise ValueError(f"the engines were measured with different settings: {key}")
    load = Load(**files[0]["load"])
    result: dict[str, Any] = {key: files[0][key] for key in same}
    result |= {"runs": [each["run"] for each in files], "policies": {}, "cold": {}}
    off = {each["policy"]: each["requests"] for each in files if each["share"] == "off"}
    for each in files:
        if each["share"] == "off":
            continue
        facts = {key: each[key] for key in ("config", "start_s", "num_blocks", "block_size")}
        for policy, report in each["requests"].items():
            name = policy if policy == each["policy"] else f"{policy} on {each['policy']}"
            result["policies"][name] = facts | sessions_of(report, load)
            without = off.get(each["policy"], {}).get(policy, {}).get("cold", {})
            result["cold"][name] = cold_of(report["cold"], without)
    stock = result["policies"].get(STOCK)
    for name, entry in result["policies"].items():
        if stock is not None and name != STOCK:
            entry["against_stock"] = against(entry, stock)
    return result


def against(entry: Mapping[str, Any], stock: Mapping[str, Any]) -> dict[str, float | None]:
    """A policy's figures over stock's."""
    pairs = {
        "later_hit_rate": [each["later"]["hit_rate"] for each in (entry, stock)],
        "later_mean_ttft": [each["later"]["mean_ttft_ms"] for each in (entry, stock)],
        "first_mean_ttft": [each["first"]["mean_ttft_ms"] for each in (entry, stock)],
        "tokens_per_s": [each["tokens_per_s"] for each in (entry, stock)],
    }
    return {
        key: round(ours / theirs, 4) if theirs else None for key, (ours, theirs) in pairs.items()
    }


def cold_of(
    on: Mapping[str, Sequence[float]], off: Mapping[str, Sequence[float]]
) -> dict[str, dict[str, float]]:
    """Median TTFT in ms of new prompts by length, with sharing and without it."""
    found: dict[str, dict[str, float]] = {}
    for length, times in on.items():
        found[length] = {"on_ms": round(statistics.median(times), 3), "on_spread": spread(times)}
        if length in off:
            found[length]["off_ms"] = round(statistics.median(off[length]), 3)
            found[length]["off_spread"] = spread(off[length])
            found[length]["on_over_off"] = round(
                statistics.median(times) / statistics.median(off[length]), 4
            )
    return found


def spread(times: Sequence[float]) -> float:
    """(max - min) / median."""
    return round((max(times) - min(times)) / statistics.median(times), 4)


def sessions_of(report: Mapping[str, Any], load: Load) -> dict[str, Any]:
    """Figures of one policy's sessions: by turn, of the first and of all later ones."""
    turns = [Turn(**each) for each in report["turns"]]
    by_turn: list[dict[str, Any]] = []
    for turn in range(load.turns):
        now = [t for t in turns if t.turn == turn]
        entry = {"turn": turn + 1, "prompt_len": load.prompt_len(turn), **figures(now)}
        if turn:
            # Sessions of which all of the turn before was still there.
            before = load.prompt_len(turn - 1)
            entry["held"] = sum(t.cached >= before - _SLACK for t in now)
        by_turn.append(
            entry | {"ttft_ms": [t.ttft for t in now], "cached": [t.cached for t in now]}
        )
    return {
        "complete": report["complete"],
        "seconds": report["seconds"],
        "tokens_per_s": round(len(turns) * load.answer / report["seconds"], 2),
        "prompt_tokens_per_s": round(sum(t.prompt_len for t in turns) / report["seconds"], 1),
        "preemptions": report["counters"]["preemptions"],
        "first": figures([t for t in turns if not t.turn]),
        "later": figures([t for t in turns if t.turn]),
        **held(by_turn[1:], load),
        "vllm_counters": report["counters"],
        "vllm_kvx_counters": report["policies"],
        "turns": by_turn,
    }


def held(later: Sequence[Mapping[str, Any]], load: Load) -> dict[str, Any]:
    """How many sessions the cache held at once, and how long they were when it first lost one.

    all_held_to: the longest prompts, in tokens, of which all sessions' were there a turn later.
    """
    all_held_to = 0
    for entry in later:
        if entry["held"] < load.sessions:
            break
        all_held_to = load.prompt_len(entry["turn"] - 2)
    return {
        "least_sessions_held": min((entry["held"] for entry in later), default=None),
        "all_held_to": all_held_to,
    }


def figures(turns: Sequence[Turn]) -> dict[str, Any]:
    """Hit rate in tokens, and latencies in ms; None where nothing ran."""
    if not turns:
        return dict.fromkeys(("hit_rate", "mean_ttft_ms", "p50_ttft_ms", "p99_ttft_ms", "tpot_ms"))
    times = sorted(t.ttft for t in turns)
    return {
        "hit_rate": round(sum(t.cached for t in turns) / sum(t.prompt_len for t in turns), 5),
        "mean_ttft_ms": round(statistics.fmean(times), 3),
        "p50_ttft_ms": round(statistics.median(times), 3),
        "p99_ttft_ms": times[math.ceil(0.99 * len(times)) - 1],
        "tpot_ms": round(statistics.median(t.tpot for t in turns), 3),
    }


def curves(pyplot: Any, result: Mapping[str, Any]) -> Any:
    """Mean time to first token over the turns: a line for each policy."""
    figure, axis = pyplot.subplots(figsize=(7, 4))
    for name, entry in result["policies"].items():
        ran = [turn for turn in entry["turns"] if turn["mean_ttft_ms"] is not None]
        axis.plot(
            [turn["prompt_len"] / 1024 for turn in ran],
            [turn["mean_ttft_ms"] / 1000 for turn in ran],
            marker="o",
            markersize=3,
            label=name,
        )
    load = result["load"]
    axis.set_title(f"{load['sessions']} sessions at once, {load['turns']} turns each", loc="left")
    axis.set_xlabel("prompt of the turn (1024 tokens)")
    axis.set_ylabel("mean time to first token (s)")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)
    figure.tight_layout()
    return figure
