"""What `benchmarks.serving.turns` measured: by turn, by policy, and against stock vLLM."""

import math
import statistics
from collections import Counter
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
    """One request; turns count from 0.

    cached: tokens from the prefix cache. ttft, tpot: ms. ended: seconds since sessions began.
    """

    session: int
    turn: int
    prompt_len: int
    cached: int
    ttft: float
    tpot: float
    preemptions: int
    ended: float


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
    heads = [each["about"] for each in files]
    # The head of the last engine that was measured; `runs` has all of them.
    result: dict[str, Any] = {"about": max(heads, key=lambda head: str(head["date"]))}
    result |= {key: files[0][key] for key in same}
    result |= {"runs": [run_of(head) for head in heads], "policies": {}, "cold": {}}
    asked: dict[str, list[Turn]] = {}
    off = {each["policy"]: each["requests"] for each in files if each["share"] == "off"}
    for each in files:
        if each["share"] == "off":
            continue
        facts = {key: each[key] for key in ("config", "start_s", "num_blocks", "block_size")}
        for policy, report in each["requests"].items():
            name = policy if policy == each["policy"] else f"{policy} on {each['policy']}"
            asked[name] = [Turn(**turn) for turn in report["turns"]]
            result["policies"][name] = facts | sessions_of(report, asked[name], load)
            without = off.get(each["policy"], {}).get(policy, {}).get("cold", {})
            result["cold"][name] = cold_of(report["cold"], without)
    for name, entry in result["policies"].items():
        if STOCK in asked and name != STOCK:
            entry["against_stock"] = against(asked[name], asked[STOCK], load)
    return result


def run_of(head: Mapping[str, Any]) -> dict[str, Any]:
    """A head as an entry of `runs`."""
    return {key: head[key] for key in ("command", "date", "commit", "versions")} | {
        "gpu": head["device"]
    }


def against(ours: Sequence[Turn], stock: Sequence[Turn], load: Load) -> dict[str, Any]:
    """A policy's requests against stock's, of turns that all sessions of both were answered.

    later: from the second turn on. fitting: of these, up to the last before stock's cache loses
    some of a session. Each with the number of the last turn that counts, and ratios to stock's;
    that of tokens_per_s includes the first turn.
    """
    both = ours, stock
    last = min(all_answered(each, load) for each in both)
    lost = {t.turn for t in stock if t.turn and not is_held(t, load)}
    first = (figures([t for t in each if not t.turn]) for each in both)
    found: dict[str, Any] = {"first_mean_ttft": ratio(*(each["mean_ttft_ms"] for each in first))}
    for name, end in ("later", last), ("fitting", min([last, *lost])):
        now = [figures([t for t in each if 0 < t.turn < end]) for each in both]
        found[name] = {
            "turns_to": end,
            "hit_rate": ratio(*(each["hit_rate"] for each in now)),
            "mean_ttft": ratio(*(each["mean_ttft_ms"] for each in now)),
            "p99_ttft": ratio(*(each["p99_ttft_ms"] for each in now)),
            "tokens_per_s": ratio(*(speed([t for t in each if t.turn < end]) for each in both)),
        }
    return found


def speed(turns: Sequence[Turn]) -> float | None:
    """Turns a second until the last of them was answered."""
    return len(turns) / max(t.ended for t in turns) if turns else None


def is_held(turn: Turn, load: Load) -> bool:
    """Whether all of the turn before was still in the cache."""
    return turn.cached >= load.prompt_len(turn.turn - 1) - _SLACK


def all_answered(turns: Sequence[Turn], load: Load) -> int:
    """Turns, from the first on, that all sessions were answered."""
    done = Counter(t.turn for t in turns)
    return next((turn for turn in range(load.turns) if done[turn] < load.sessions), load.turns)


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """None where either was not measured."""
    return round(ours / theirs, 4) if ours is not None and theirs else None


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


def sessions_of(report: Mapping[str, Any], turns: Sequence[Turn], load: Load) -> dict[str, Any]:
    """Figures of one policy's sessions: by turn, of the first and of all later ones."""
    by_turn: list[dict[str, Any]] = []
    for turn in range(load.turns):
        now = [t for t in turns if t.turn == turn]
        entry = {"turn": turn + 1, "prompt_len": load.prompt_len(turn), **figures(now)}
        if turn:
            # Sessions of which all of the turn before was still there.
            entry["held"] = sum(is_held(t, load) for t in now)
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
