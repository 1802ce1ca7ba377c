"""What decides which of a prompt's entries stay, and which of its tokens go on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ScoreSpec:
    """How a layer's keys are scored once the prompt is in.

    family: the row of ``scores/table.py`` that computes the scores.
    window: last tokens; their queries score the keys, and they always stay. 0 for a family that
        asks no query.
    kernel: width of the max-pooling over neighbouring keys; 1 does not pool.
    over_heads: whether the scores of all heads are summed to one for the layer; otherwise every KV
        head has its own.
    decay: the factor of the sum over the layers below, to which this layer's scores are added
        (StructKV Eq. 3); None takes each layer by itself.
    needs_value_norms: whether it needs the server's factors of the output projections.
    generated: how many of the window are generated tokens; the keys are scored once these are in.
    drafted: how many of the window are drafted tokens, which run behind the prompt in the step that
        ends it, and of which nothing stays.
    """

    family: str
    window: int = 0
    kernel: int = 1
    over_heads: bool = False
    decay: float | None = None
    needs_value_norms: bool = False
    generated: int = 0
    drafted: int = 0

    @property
    def prompt_window(self) -> int:
        """Those of the window that are the prompt's last tokens."""
        return self.window - self.generated - self.drafted


@dataclass(frozen=True)
class Positions:
    """Entries stay by position: the first `sinks`, and the last ones up to the cap."""

    sinks: int
