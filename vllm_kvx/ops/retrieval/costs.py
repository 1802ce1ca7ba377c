"""What a layer of a decode step takes, with stock attention and with retrieval."""

from dataclasses import dataclass, replace

import numpy as np

from vllm_kvx.ops.retrieval.crossover import NEVER, crossover

# Costs by entry are told for so many.
KI = 1024


@dataclass(frozen=True)
class Costs:
    """Microseconds of one layer, whatever its requests.

    Stock attention takes `whole` and `whole_entry` for every Ki entries of all requests. Retrieval
    takes `fixed`, `scored` for every Ki entries of the requests that retrieve, and `read` for every
    Ki tokens of their budgets. Where those that retrieve have fewer than `least` entries in all,
    nothing was measured, and it is taken not to pay.
    """

    whole: float
    whole_entry: float
    fixed: float
    scored: float
    read: float
    least: int = 0

    def shared(self, choosing: float, attends: float) -> "Costs":
        """Those of a layer on average, where some layers read what others have chosen.

        choosing: the share of the layers that score and select. attends: the share of `fixed` that
            is attention's, which every layer takes, as it does `read`.
        """
        fixed = self.fixed * (attends + (1 - attends) * choosing)
        return replace(self, fixed=fixed, scored=self.scored * choosing)

    def gain(self, entries: np.ndarray, budgets: np.ndarray) -> np.ndarray:
        """Microseconds that each request saves by retrieving, where others do so already.

        entries: those it sees; budgets: tokens it reads instead. Any shapes that broadcast.
        """
        return ((self.whole_entry - self.scored) * entries - self.read * budgets) / KI

    def pays_from(self, budget: int, num_reqs: int) -> int:
        """Entries of each of `num_reqs` requests from which on it pays that they all retrieve.

        budget: tokens that each reads. NEVER if at no length.
        """
        by_entry = self.whole_entry - self.scored
        if by_entry <= 0:
            return NEVER
        shared = max(self.fixed - self.whole, 0) * KI / num_reqs
        paid = int((self.read * budget + shared) / by_entry) + 1
        return min(max(paid, -(-self.least // num_reqs)), NEVER)


@dataclass(frozen=True)
class StepCosts:
    """Those of a layer by the rows of its step.

    many: in three launches. few: in one, which takes steps of up to `few_rows` rows; None where it
    takes none, or was not measured.
    """

    many: Costs
    few: Costs | None = None
    few_rows: int = 0

    def of(self, num_rows: int) -> Costs:
        return self.few if self.few is not None and num_rows <= self.few_rows else self.many


@dataclass(frozen=True)
class Begins:
    """Entries from which on requests of one policy retrieve.

    alone: whatever else runs. batch: in steps of `num_reqs` requests of that many entries each.
    one: in a step of one request whose layers one launch does each, NEVER if none does.
    """

    alone: int
    batch: int
    num_reqs: int
    one: int = NEVER

    @classmethod
    def of(cls, alone: int, least: int, budget: int, costs: StepCosts, num_reqs: int) -> "Begins":
        """Those of a policy that reads `budget` tokens, and all of fewer than `least` entries."""

        def paid(rows: int) -> int:
            return min(max(costs.of(rows).pays_from(budget, rows), least), alone)

        return cls(alone, paid(num_reqs), num_reqs, paid(1) if costs.few else NEVER)

    @property
    def shortest(self) -> int:
        return min(self.batch, self.one)

    def __str__(self) -> str:
        if self.shortest == NEVER:
            return "of no length"
        said = [f"from {self.alone} tokens on" if self.alone < NEVER else "of no length alone"]
        if self.one < self.alone:
            said.append(f"from {self.one} in a step of its own")
        if self.batch < self.alone and self.batch != self.one:
            said.append(f"from {self.batch} in steps of {self.num_reqs} such requests")
        return ", ".join(said)


# Retrieval takes so much longer in a layer of an engine than in a layer by itself, in microseconds.
# Computed from TPOT at 12,288 tokens, whole and with `dense_below=0` (h200-fier.json: 8 KV heads of
# 128 channels, CUDA ops), and taken for all shapes and ops.
IN_ENGINE_US = 4.28
# What a layer that retrieves takes longer besides, where other layers of the model keep a state. On
# Qwen3-Next's shape (h100-qwen3-next.json: 2 KV heads of 256 channels, blocks of 544) one request
# of 130,000 entries lost 786 us in each such layer, where these costs have it save 43. Nothing in
# the ops goes by blocks, so what it is has yet to be found. A batch may hide it: 64 of 32,768
# gained 1,072 us, where these costs have them save 888. So a batch retrieves if it saves more than
# was ever lost.
BESIDE_STATES_US = 829.0
# Attention's share of `Costs.fixed`, of the CUDA ops by h200-retrieval-ops.json and of Triton's by
# h200-retrieval-variants.json (8 KV heads of 128 channels, by the same command), and taken for all
# shapes. With it these costs have layers that share a choice take what h100-retrieval-reuse.json
# measured of them, give or take a fifth.
ATTENDS = {"cuda": 0.38, "triton": 0.46}
# The budget that `alone_from` is computed for: the largest that ``crossover`` was measured for.
TABLE_BUDGET = 2048
# By the backend that scores and selects, and by (KV heads of the rank, bytes of a key and a value
# of one head): fitted to h200-retrieval-crossover.json and, for Triton,
# h200-retrieval-crossover-triton.json by `python -m benchmarks.ops.retrieval_costs`.
COSTS: dict[str, dict[tuple[int, int], Costs]] = {
    "cuda": {
        (2, 256): Costs(14.858, 0.187, 24.951, 0.049, 0.089),
        (4, 256): Costs(15.202, 0.338, 24.633, 0.1, 0.473),
        (8, 256): Costs(14.024, 0.696, 22.727, 0.138, 0.914),
        (2, 512): Costs(16.742, 0.319, 27.799, 0.087, 0.184),
        (4, 512): Costs(16.523, 0.587, 27.652, 0.154, 0.804),
        (8, 512): Costs(15.91, 1.189, 23.715, 0.202, 1.553),
    },
    "triton": {
        (2, 256): Costs(19.096, 0.154, 37.662, 0.089, 0.681),
        (4, 256): Costs(20.018, 0.273, 40.699, 0.168, 0.831),
        (8, 256): Costs(19.297, 0.535, 44.263, 0.277, 1.088),
        (2, 512): Costs(19.656, 0.271, 39.706, 0.111, 0.761),
        (4, 512): Costs(20.178, 0.497, 43.428, 0.211, 1.042),
        (8, 512): Costs(18.817, 1.015, 45.954, 0.327, 1.502),
    },
    "torch": {},
}
# The same of few rows, where one launch does a layer (``one_launch``), by the shapes that it takes,
# however many query heads share a KV head: fitted by the same command to layers as a step has them,
# with the rest between (h200-one-launch-shapes.json, h200-costs-in-a-step.json and three files of
# Llama 3.1 8B's shape). With fewer entries in all no engine retrieved in one launch.
ONE_LAUNCH_LEAST = 12_288
ONE_LAUNCH = {
    (2, 256): Costs(11.187, 0.152, 14.803, 0.012, 0.068, ONE_LAUNCH_LEAST),
    (2, 512): Costs(13.107, 0.289, 17.122, 0.041, 0.0, ONE_LAUNCH_LEAST),
    (4, 512): Costs(12.701, 0.498, 14.222, 0.061, 0.891, ONE_LAUNCH_LEAST),
    (8, 256): Costs(10.129, 0.517, 12.986, 0.1, 0.973, ONE_LAUNCH_LEAST),
    (8, 512): Costs(12.629, 0.968, 13.853, 0.115, 1.825, ONE_LAUNCH_LEAST),
}
# And so much longer in an engine, as `IN_ENGINE_US`: from TPOT at 12,288 to 32,768 tokens, by
# policies of which 30 and 32 layers retrieve, the former while servers started on the host
# (h200-few-rows.json; 3.4 to 4.0 us). On two other machines engines lost nothing
# (h200-decode-shorter-code.json, h200-few-rows-of-1.json), and why is not known: there it is a
# margin, by which a layer has to gain before an answer may change for it.
ONE_LAUNCH_IN_ENGINE_US = 3.74
# On a CPU retrieval gains nothing, and every length may try it.
_ALWAYS = Costs(whole=0, whole_entry=1, fixed=0, scored=0, read=0)
_NEVER = Costs(whole=0, whole_entry=0, fixed=0, scored=0, read=0)


def costs(
    backend: str,
    reduction: str,
    kv_heads: int,
    head_bytes: int,
    *,
    keeps_state: bool = False,
    invariant: bool = False,
    choosing: float = 1.0,
) -> Costs:
    """Those of a layer in an engine.

    A shape that was not measured is taken for the largest one that has no more KV heads and bytes,
    where stock attention reads less. Where none is as small, stock attention is taken to read as
    many more entries in the same time as they are smaller, and retrieval to take the same. Where
    other layers keep a state, what goes by entries is taken by their bytes instead.

    Args: see ``crossover.crossover``.
        invariant: whether answers may not depend on the batch (vLLM's VLLM_BATCH_INVARIANT): none
            pays then, and contexts retrieve by their own length alone.
        choosing: the share of the layers that choose what they and others read; costs are then
            those of a layer on average. In an engine each is taken to lose as much.
    """
    if invariant:
        return _NEVER
    measured = COSTS[backend]
    if not measured:
        return _ALWAYS
    # Its two passes over the units were not measured for batches.
    if backend == "triton" and reduction == "softmax":
        return _NEVER
    no_larger = [shape for shape in measured if shape[0] <= kv_heads and shape[1] <= head_bytes]
    if no_larger:
        heads, size = max(no_larger, key=lambda shape: shape[0] * shape[1])
        found = measured[heads, size]
        if keeps_state:
            found = _of_larger(found, kv_heads * head_bytes / (heads * size))
    else:
        heads, size = min(measured, key=lambda shape: shape[0] * shape[1])
        smaller = max(heads * size / (kv_heads * head_bytes), 1)
        found = measured[heads, size]
        found = replace(found, whole_entry=found.whole_entry / smaller)
    if choosing < 1:
        found = found.shared(choosing, ATTENDS[backend])
    besides = IN_ENGINE_US + (BESIDE_STATES_US if keeps_state else 0.0)
    return replace(found, fixed=found.fixed + besides)


def step_costs(
    backend: str,
    reduction: str,
    kv_heads: int,
    head_bytes: int,
    keeps_state: bool,
    invariant: bool,
    choosing: float,
    *,
    few_rows: int,
) -> StepCosts:
    """Those of a layer in an engine, by the rows of a step.

    Args: see `costs`.
        few_rows: of steps that one launch does, 0 if it does none. Not where layers keep a state,
            or where answers may not depend on the batch: what these lose or promise holds there.
    """
    machine = backend, reduction, kv_heads, head_bytes
    many = costs(*machine, keeps_state=keeps_state, invariant=invariant, choosing=choosing)
    shapes = [each for each in ONE_LAUNCH if each[0] <= kv_heads and each[1] == head_bytes]
    if not few_rows or not shapes or keeps_state or invariant:
        return StepCosts(many)
    few = ONE_LAUNCH[max(shapes)]
    return StepCosts(many, replace(few, fixed=few.fixed + ONE_LAUNCH_IN_ENGINE_US), few_rows)


def alone_from(
    backend: str,
    reduction: str,
    kv_heads: int,
    head_bytes: int,
    *,
    keeps_state: bool = False,
    choosing: float = 1.0,
) -> int:
    """Entries from which on one request's step is faster; NEVER if at no length, 0 for all.

    It is what was measured, where every layer chooses. Where some read what others have chosen, it
    is what these costs have, if that is less: at such lengths nobody has measured them.

    Args: see `costs`, and ``crossover.crossover``.
    """
    machine = backend, reduction, kv_heads, head_bytes
    measured = crossover(*machine, keeps_state=keeps_state)
    if choosing == 1 or measured in (0, NEVER):
        return measured
    return min(measured, costs(*machine, choosing=choosing).pays_from(TABLE_BUDGET, 1))


def _of_larger(found: Costs, times: float) -> Costs:
    """Those of entries that have `times` as many bytes."""
    return replace(
        found,
        whole_entry=found.whole_entry * times,
        scored=found.scored * times,
        read=found.read * times,
    )
