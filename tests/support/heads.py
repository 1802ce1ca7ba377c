"""Engines whose tokens a head drafts by the model's hidden states, and what it should draft."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reference.heads import Head, Kind, build_head

from support.drafts import Drafted

# A draft that is nearly as likely as another may be either.
CLEAR = 1e-3


class Models(NamedTuple):
    """model: the references'. served: the engine's. head: what drafts for it."""

    model: Path
    served: Path
    head: Path

    @classmethod
    def of(cls, tiny: Callable[..., Path], folder: Path, kind: Kind, **shape: Any) -> "Models":
        """Tiny ones; the head is written into `folder`."""
        model = tiny("qwen2" if kind == "mtp" else "llama", **shape)
        head = build_head(folder / kind, model, kind)
        return cls(model, head if kind == "mtp" else model, head)

    def dense(self, kind: Kind) -> Head:
        """The head's dense reference."""
        return Head.load(self.head, self.model, kind)


def drafted_by(head: Path, kind: Kind, count: int, **others: Any) -> dict[str, Any]:
    """Options of an engine that verifies what `head` has drafted, `count` tokens a step."""
    drafter: dict[str, Any] = {"method": kind, "num_speculative_tokens": count}
    if kind != "mtp":  # Which is a part of the model.
        drafter["model"] = str(head)
    return {"speculative_config": drafter, "async_scheduling": False, **others}


def assert_dense(found: Sequence[Drafted], head: Head) -> None:
    """All that was `found` drafted is what the head drafts that reads the whole text."""
    compared = 0
    for one in found:
        assert one.states is not None
        logits = head.drafts(one.tokens, one.states, len(one.drafts))
        for row, draft in zip(logits, one.drafts, strict=True):
            best, second = row.topk(2).values.tolist()
            if best - second < CLEAR:
                break
            assert int(row.argmax()) == draft, (one.request, len(one.tokens), one.drafts)
            compared += 1
    assert compared >= len(found) > 0
