"""Prompts longer than any that was measured, by arithmetic from what was: time, memory, room.

    python -m benchmarks.engine.longer h200-fastkv.json --lengths 524288 1048576

Stock's time to first token is taken to be a T + b P: T the FLOPs that grow with the prompt, P those
that grow with its square (attention), and a, b from two measured prompts. A step's time is c + d B,
B its bytes, likewise. A policy gets its ideal gain at the length, times the share of its ideal that
it reached at the longest prompt measured. The KV pool is the measured one, in bytes.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.names import STOCK
from benchmarks.engine.ideal import Case
from benchmarks.engine.shapes import shape_of
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.policy.storage import storage_of
from vllm_kvx.tools.ideal import work as counted
from vllm_kvx.tools.ideal.shape import Shape
from vllm_kvx.tools.ideal.work import Work

LENGTHS = (262_144, 524_288, 1_048_576)
# Bytes of a number in the cache and in hidden states.
_BYTES = 2
GB = 1e9


@dataclass(frozen=True)
class Memory:
    """Bytes that one prompt takes of the KV pool, and what else is held for it.

    most: its entries at the most, while it comes in. kept: those that stay. stash: hidden states
        of a prompt whose tokens are chosen. scores: of its keys in one layer, and what they were
        before pooling, in float32.
    """

    most: int
    kept: int
    stash: int
    scores: int

    @property
    def needed(self) -> int:
        return self.most + self.stash + self.scores


@dataclass(frozen=True)
class Estimate:
    """One prompt of `length` tokens. ttft_s and tpot_ms: None without measurements to go on from.

    fits: whether the measured pool holds it while it comes in.
    """

    engine: str
    length: int
    ttft_s: float | None
    tpot_ms: float | None
    memory: Memory
    fits: bool


def memory_of(shape: Shape, policy: str | None, length: int) -> Memory:
    """What a prompt takes under a policy by name; None is stock."""
    parsed = parse_policy(policy or "full")
    stored = [
        storage_of(parsed, length, layer, counted.BLOCK_SIZE, shape.layers)
        for layer in range(shape.layers)
    ]
    work = counted.work_of(policy, shape.layers, length)
    if work is None:
        raise ValueError(f"{policy}: which layer selects is not known before the prompt runs")
    entry = 2 * shape.kv_heads * shape.head_dim * _BYTES
    beside = round(sum(work.sidecar) * entry)
    chooses = parsed.selection(length, shape.layers) is not None
    scores = parsed.retain is not None or chooses
    return Memory(
        most=sum(max(each.rows, each.kept) for each in stored) * entry + beside,
        kept=sum(each.kept for each in stored) * entry + beside,
        stash=length * shape.hidden * _BYTES if chooses else 0,
        scores=2 * 4 * shape.kv_heads * length if scores else 0,
    )


def estimates(content: Mapping[str, Any], lengths: Sequence[int]) -> list[Estimate]:
    """Every engine of a file of `benchmarks.engine.compare` whose work is known, at every length.

    Raises:
        ValueError: the file has no stock engine with two times to first token.
    """
    shape, engines = shape_of(content["model"]), content["engines"]
    stock = _measured(engines.get(STOCK, {}))
    if len(stock["ttft"]) < 2:
        raise ValueError("stock has to be measured at two prompt lengths: ttft:N, ttft:M")
    pool = engines[STOCK]["pool"]["tokens"] * _full_bytes(shape, 1)
    found = []
    for name, engine in engines.items():
        policy = None if name == STOCK else name
        if counted.work_of(policy, shape.layers, max(lengths)) is None:
            continue
        measured = _measured(engine)
        for length in lengths:
            memory = memory_of(shape, policy, length)
            ttft = _ttft(shape, policy, measured["ttft"], stock["ttft"], length)
            tpot = _tpot(shape, policy, measured["tpot"], stock["tpot"], length)
            fits = memory.needed <= pool
            found.append(Estimate(name, length, ttft, tpot, memory, fits))
    return found


def _measured(engine: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Milliseconds by length, of `ttft` and `tpot`, as far as requests had the engine's policy."""
    found: dict[str, dict[int, float]] = {"ttft": {}, "tpot": {}}
    for text, result in engine.get("cases", {}).items():
        case = Case.parse(text)
        if case.kind in found and case.policy is None and "median" in result:
            found[case.kind][case.length] = result["median"]
    return found


def _ttft(
    shape: Shape,
    policy: str | None,
    measured: Mapping[int, float],
    stock: Mapping[int, float],
    length: int,
) -> float | None:
    if not measured:
        return None
    lengths = sorted(stock)
    rows = [_prefill_parts(shape, each) for each in lengths]
    seconds = _line(rows, [stock[each] / 1e3 for each in lengths], _prefill_parts(shape, length))
    longest = max(measured)
    gain, there = (counted.prefill_ratio(shape, policy, each) for each in (length, longest))
    if policy is None or gain is None or there is None:
        return seconds
    reached = stock[longest] / measured[longest] / there
    return seconds / (gain * reached)


def _tpot(
    shape: Shape,
    policy: str | None,
    measured: Mapping[int, float],
    stock: Mapping[int, float],
    length: int,
) -> float | None:
    both = sorted(set(measured) & set(stock))
    if len(stock) < 2 or not both:
        return None

    def parts(each: int, work: Work | None = None) -> tuple[float, float]:
        return 1.0, counted.decode_bytes(shape, work or counted.full_work(shape.layers, each))

    lengths = sorted(stock)
    rows, times = [parts(each) for each in lengths], [stock[each] for each in lengths]
    work, there = (counted.work_of(policy, shape.layers, each) for each in (length, both[-1]))
    found = _line(rows, times, parts(length, work))
    # What a step takes beyond its bytes: known at the longest prompt measured.
    return found * measured[both[-1]] / _line(rows, times, parts(both[-1], there))


def _prefill_parts(shape: Shape, length: int) -> tuple[float, float]:
    """FLOPs of stock's prefill that grow with the prompt, and with its square."""
    work = counted.full_work(shape.layers, length)
    attention = counted.attention_flops(shape, work)
    return counted.prefill_flops(shape, work) - attention, attention


def _line(
    rows: Sequence[tuple[float, float]], values: Sequence[float], at: tuple[float, float]
) -> float:
    """The value at `at` of the combination of two columns that fits `values` best."""
    # Each row by its value: errors count as shares.
    weighted = np.array(rows) / np.array(values)[:, None]
    found, *_ = np.linalg.lstsq(weighted, np.ones(len(values)), rcond=None)
    return float(np.dot(at, found))


def _full_bytes(shape: Shape, length: int) -> int:
    return length * shape.layers * 2 * shape.kv_heads * shape.head_dim * _BYTES


def table(found: Sequence[Estimate]) -> str:
    """Markdown, a row for an engine and length."""
    lines = [
        "| prompt | engine | TTFT, s | TPOT, ms | KV at most, GB | KV kept, GB | stash, GB "
        "| scores, GB | in that pool |",
        "|" + "---|" * 9,
    ]
    for each in sorted(found, key=lambda one: one.length):
        memory = each.memory
        sizes = (memory.most, memory.kept, memory.stash, memory.scores)
        cells = [
            f"{each.length:,}",
            f"`{each.engine}`",
            "" if each.ttft_s is None else f"{each.ttft_s:.3g}",
            "" if each.tpot_ms is None else f"{each.tpot_ms:.1f}",
            *(f"{size / GB:.1f}" if size >= GB / 10 else f"{size / GB:.2f}" for size in sizes),
            "yes" if each.fits else "**no**",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.engine.longer", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("files", nargs="+", type=Path, help="results of benchmarks.engine.compare")
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    args = parser.parse_args(argv)
    for path in args.files:
        try:
            found = estimates(json.loads(path.read_text(encoding="utf-8")), args.lengths)
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"{path}: {error}; give results of benchmarks.engine.compare")
        print(f"{path.name}\n\n{table(found)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
