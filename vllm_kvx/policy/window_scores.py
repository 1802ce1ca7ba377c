"""How a window's queries score the keys that are retained by them: `score=`, by the papers' names.

Every method that retains by a window takes its scores from here.
"""

from dataclasses import dataclass
from typing import Any

from vllm_kvx.policy.axes import ScoreSpec
from vllm_kvx.policy.parameters import choice

# The score of a method that names none: the form of SnapKV's, FastKV's, StructKV's and PyramidKV's
# papers.
DEFAULT_SCORE = "attention"


@dataclass(frozen=True)
class _Families:
    """The rows of ``scores/table.py`` for one score.

    by_head: where each KV head keeps its own entries. shared: where all heads keep the same.
    needs_value_norms: see ``ScoreSpec``.
    """

    by_head: str
    shared: str
    needs_value_norms: bool = False


# `critical` is CriticalKV's (arXiv 2502.03805): it asks how much a value moves the output, too.
_FAMILIES = {
    "attention": _Families("window_attention", "window_attention"),
    "critical": _Families(
        "value_weighted_attention", "shared_value_weighted_attention", needs_value_norms=True
    ),
}
WINDOW_SCORES = tuple(_FAMILIES)


def window_score() -> Any:
    """Declares the field `score`: what a window scores keys by."""
    return choice(DEFAULT_SCORE, WINDOW_SCORES)


def retained_by(score: str, window: int, kernel: int, over_heads: bool = False) -> ScoreSpec:
    """How keys are scored for retention.

    score: one of WINDOW_SCORES. The others are ``ScoreSpec``'s.
    """
    families = _FAMILIES[score]
    family = families.shared if over_heads else families.by_head
    return ScoreSpec(
        family,
        window,
        kernel,
        over_heads=over_heads,
        needs_value_norms=families.needs_value_norms,
    )
