"""What a run found: one table, what to type, and the same as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_kvx.policy.auto import FALLBACK
from vllm_kvx.policy.spec import is_bare, parse_policy, servable
from vllm_kvx.tools.recommend.gains import Workload
from vllm_kvx.tools.recommend.ladder import LeftOut
from vllm_kvx.tools.recommend.rounds import Rounds, Standing
from vllm_kvx.tools.recommend.stopping import LEVEL, Verdict

_HEAD = (
    *("policy", "answers kept", "of right", "keeps them", "first token", "next token"),
    *("KV pool", "requests/s", "what to type"),
)
_SAYS = {
    Verdict.KEPT: "yes",
    Verdict.LOST: "no",
    Verdict.UNDECIDED: "not decided",
    Verdict.OUTDONE: "outdone",
}


def table(rounds: Rounds) -> str:
    """A row of every policy that was asked or waits, those that gain most first."""
    rows = [_HEAD, *map(_row, rounds.standings)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _row(standing: Standing) -> tuple[str, ...]:
    gains, share = standing.candidate.gains, standing.share
    kept = "not asked"
    if share is not None:
        kept = f"{share.value:.1%} [{share.low:.1%}-{share.high:.1%}]"
    typed = f"--kv-policy {typed_as(standing.candidate.name)}"
    factors = (gains.ttft, gains.tpot, gains.pool, gains.requests)
    return (
        standing.candidate.name,
        kept,
        f"{standing.right:.3g}",
        _SAYS[standing.verdict],
        *(f"{factor:.2f}x" for factor in factors),
        typed if standing.verdict is Verdict.KEPT else "",
    )


def typed_as(name: str) -> str:
    """A ladder's name as a server takes it."""
    return servable(parse_policy(name)) if is_bare(name) else name


def text(
    rounds: Rounds, keep: float, workload: Workload, device: str, left_out: Sequence[LeftOut]
) -> str:
    """The table with what its figures are, and what was left out."""
    lines = [
        table(rounds),
        "",
        f"Answers kept: of full's right answers, with intervals that hold at each of "
        f"{rounds.questions.rounds} looks together with {LEVEL:.0%}; wanted are {keep:.1%}. "
        "Outdone: another keeps them and gains more.",
        f"Gains over full, for {workload}, by counts of FLOPs, bytes and KV entries on {device}. "
        "Kernels reach a part of them.",
    ]
    lines += [f"Left out: {name}: {why}." for name, why in left_out]
    return "\n".join(lines)


def advice(rounds: Rounds, model: str, keep: float, saved: bool) -> str:
    """What to type in the end."""
    best = rounds.best
    if best is None:
        undecided = any(each.verdict is Verdict.UNDECIDED for each in rounds.standings)
        more = "more time or --samples decide more, " if undecided else ""
        return (
            f"No policy was shown to keep {keep:.1%} of the answers: {more}a lower --keep asks for "
            f"less. --kv-policy auto serves {FALLBACK} then, and says that nothing was shown."
        )
    named = f"vllm serve {model} --kv-policy {typed_as(best.name)}"
    auto = f", or --kv-policy auto:keep={keep:g}, which finds this record" if saved else ""
    return f"To serve the best: {named}{auto}"


def as_json(
    rounds: Rounds, facts: Mapping[str, Any], left_out: Sequence[LeftOut]
) -> dict[str, Any]:
    """All of it for programs."""
    best = rounds.best
    return {
        **facts,
        "level": rounds.level,
        "rounds": rounds.questions.rounds,
        "out_of_time": rounds.out_of_time,
        "chosen": best and best.name,
        "policies": [
            {
                "policy": each.candidate.name,
                "verdict": str(each.verdict),
                "kept": each.share and list(each.share),
                "n": each.asked,
                "right": each.right,
                "gains": each.candidate.gains.as_json(),
            }
            for each in rounds.standings
        ],
        "left_out": [each._asdict() for each in left_out],
    }
