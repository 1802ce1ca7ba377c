"""The questions that a policy answers about prompt tokens, as interfaces.

A method is one frozen dataclass that answers one or more of them (``methods/``). Everything here
counts and names; nothing computes. So the scheduler and the worker ask the same objects, on the
host, and agree on every count. Prompt lengths, rows and entries are in tokens, layers count from 0.
"""

import dataclasses
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from vllm_kvx.policy.gap import NO_GAP, Gap
from vllm_kvx.policy.measurement import Measurement
from vllm_kvx.policy.parameters import PolicyError, Value, write_value
from vllm_kvx.policy.retrieval_layers import RetrievalLayers
from vllm_kvx.policy.score_spec import Positions, ScoreSpec

AXES = ("propagate", "retain", "retrieve")
# Where a method spends less than stock vLLM.
PREFILL, KV_MEMORY, DECODE_READS = "prefill", "KV memory", "decode reads"
# How scores of query heads become one: see ``equations.retrieval.reduce_heads``.
REDUCTIONS = ("max", "sum", "softmax")
# How the weights of heads and window queries become one score for all heads, and the family of
# scores that does so. The papers' reduction, which is the default, comes first.
WINDOW_FAMILIES = {"sum": "window_attention", "max": "window_maximum"}
WINDOW_REDUCTIONS = tuple(WINDOW_FAMILIES)
Weights = tuple[float, float, float]


@dataclass(frozen=True)
class OnlineRule:
    """The layer that selects is found while the prompt runs.

    lowest, highest: the layers that the rule may choose.
    weights: of entropy, sparsity and variance in the transition score (StructKV Eq. 8).
    """

    lowest: int
    highest: int
    weights: Weights


@dataclass(frozen=True)
class Selection:
    """Prompt tokens that are chosen by score once the prompt is in.

    score: what they are chosen by; summed over the heads.
    count: how many, the last ones included; fewer than the prompt has.
    after: the layer that chooses, the last one that runs every token. With `online` it is the
        highest that may be.
    resumes_at: the first layer that the chosen tokens run: `after + 1`, whose states wait in the
        stash until then, or 0 to run again from their ids.
    online: finds the layer during the pass; None if `after` is it.
    reach: last tokens that layers which slide over a window read; 0 where none does.
    """

    score: ScoreSpec
    count: int
    after: int
    resumes_at: int
    online: OnlineRule | None = None
    reach: int = 0

    @property
    def last(self) -> int:
        """The last prompt tokens, which go on whatever their score."""
        return max(self.score.window, self.reach)


@dataclass(frozen=True)
class SharedPrefix:
    """What a request that skips layers by position needs in order to read another's prefix.

    anchors: leading tokens whose entries it holds in every layer.
    tail: last prompt tokens that it has to compute itself.
    first_layer: the first layer that skips.
    """

    anchors: int
    tail: int
    first_layer: int


@dataclass(frozen=True)
class IndexSpec:
    """What finds the entries that a decode step reads.

    name: the row of ``indexes/table.py``.
    group: tokens that share a scale and a zero: the quantisation group, or the page.
    unit: tokens that are read together.
    """

    name: str
    group: int
    unit: int


@dataclass(frozen=True)
class Method:
    """One answer on one or more axes. Subclasses inherit from the axes that they can answer.

    name: the method's name, lower case.
    number: the field that `name-<int>` fills, if the method takes one; it is then mandatory.
    letter: what messages call that number.
    example: a complete name to show where a mandatory value is missing.
    to_measure: the layer that has to be measured for a model; None if there is none.
    summary, paper: what it does in a line, and where it was published.
    saves: where it spends less, of `PREFILL`, `KV_MEMORY` and `DECODE_READS`.
    needs: what a server has to have for it beside a model that is supported; empty for nothing.
    served_as: a name to serve in the place of the bare one, whose rates are a paper's and lose
        answers; empty if the bare one is served, too.

    Raises PolicyError where a parameter is outside its limits.
    """

    name: ClassVar[str]
    number: ClassVar[str] = ""
    letter: ClassVar[str] = ""
    example: ClassVar[str] = ""
    to_measure: ClassVar[Measurement | None] = None
    summary: ClassVar[str]
    paper: ClassVar[str]
    saves: ClassVar[tuple[str, ...]]
    needs: ClassVar[str] = ""
    served_as: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, limits = getattr(self, field.name), field.metadata["limits"]
            if (value is None and field.default is None) or limits.allows(value):
                continue
            if field.name == self.number:
                raise PolicyError(
                    f"{self.usage()}: {self.letter} must be {limits.wanted}, got {value!r}; "
                    f"for example {self.example}"
                )
            raise PolicyError(f"{self.name}: {field.name} must be {limits.wanted}, got {value!r}")

    def __str__(self) -> str:
        """The canonical name: parameters at their defaults are left out."""
        required = {key: getattr(self, key) for key in self.mandatory()}
        defaults = self.defaults()
        head = f"{self.name}-{required[self.number]}" if self.number else self.name
        written = [
            f"{key}={write_value(value)}"
            for key, value in self.parameters().items()
            if key != self.number and (key in required or defaults.get(key) != value)
        ]
        return f"{head}:{','.join(written)}" if written else head

    def defaults(self) -> dict[str, Value]:
        """What parameters are where they are not given, the others being as they are."""
        return type(self)(**{key: getattr(self, key) for key in self.mandatory()}).parameters()

    @property
    def advised(self) -> str:
        """A name to type: the canonical one, with the rate of `served_as` in a paper's place."""
        match = re.search(r"\bkv_rate=([0-9.]+)", self.served_as)
        if match is None or "kv_rate=" in str(self) or self.parameters().get("kv_budget"):
            return str(self)
        return str(dataclasses.replace(self, **{"kv_rate": float(match[1])}))

    @classmethod
    def usage(cls) -> str:
        """The shape of the name, for messages: `speed-K`, `fastkv`."""
        return f"{cls.name}-{cls.letter}" if cls.number else cls.name

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """The parameters that may follow the colon."""
        return tuple(f.name for f in dataclasses.fields(cls) if f.name != cls.number)

    @classmethod
    def mandatory(cls) -> tuple[str, ...]:
        """The parameters that have no default."""
        missing = dataclasses.MISSING
        return tuple(f.name for f in dataclasses.fields(cls) if f.default is missing)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes answered with these parameters, in the order of AXES."""
        bases = {"propagate": Propagate, "retain": Retain, "retrieve": Retrieve}
        return tuple(axis for axis in AXES if isinstance(self, bases[axis]))

    def parameters(self) -> dict[str, Value]:
        """Every parameter that has a value, by name."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {key: value for key, value in values.items() if value is not None}

    @property
    def unmeasured(self) -> Measurement | None:
        """The measurement that these parameters leave open; None if they leave none."""
        wanted = self.to_measure
        if wanted is not None and getattr(self, wanted.parameter) == wanted.word:
            return wanted
        return None

    def check_model(self, num_layers: int) -> None:
        """Raise PolicyError if a model of `num_layers` layers cannot run this method."""

    def notice(self, num_layers: int) -> str | None:
        """What a server that starts with this method should warn of, whatever its weights."""
        return None

    def untuned(self, num_layers: int, tuned: "Method | None" = None) -> str | None:
        """Why weights that were tuned for `tuned`, or for no method, do not suit this one.

        None if they do, as any weights suit most methods.
        """
        return None


class Propagate(Method):
    """Which tokens' hidden states go on to the layers above layer x? Answered in prefill.

    By position (`gap`) or by score (`selection`); a method overrides one of them.

    restarts: whether chosen tokens run again from their ids, so that no states wait for the choice.
    slides: whether layers above its cut may slide over a window: `window_gap` is theirs.
    selects_at: the parameter that names the layer whose scores choose; empty if positions do.
    selects_early: whether tokens may be chosen before retention has the generated ones that it
        waits for.
    overwrites: whether a generated token takes the slot of the one before it (`Gap.grows`).
    """

    restarts: ClassVar[bool] = False
    slides: ClassVar[bool] = False
    selects_at: ClassVar[str] = ""
    selects_early: ClassVar[bool] = False
    overwrites: ClassVar[bool] = False

    def row_cuts(self, num_layers: int) -> tuple[int, ...]:
        """The first layers that some rows do not run, by which the decoder is cut into segments.

        Each begins a KV group too, since fewer entries are stored from there on. PolicyError where
        a layer is not known yet.
        """
        return ()

    def gap(self, prompt_len: int, layer: int) -> Gap:
        """The prompt positions that `layer` does not store, known before the prompt runs."""
        return NO_GAP

    def window_gap(self, prompt_len: int, layer: int) -> Gap:
        """The same of a layer that slides over a window, until the gap is past.

        From then on it holds nothing of what is before the gap either: what stays follows one
        another, so that a window over stored entries is one over positions.
        """
        return NO_GAP

    def skipped(self, prompt_len: int, layer: int) -> Gap:
        """The prompt positions that do not run `layer`: by default those that it does not store."""
        return self.gap(prompt_len, layer)

    @property
    def projects_from(self) -> int | None:
        """The first layer whose prompt entries are projected, not computed; None if there is none.

        Its keys and values, and those of every layer above, are made of the states below it.
        """
        return None

    @property
    def selects_by(self) -> ScoreSpec | None:
        """What chooses the tokens; None if positions do."""
        return None

    def selection(self, prompt_len: int, num_layers: int) -> Selection | None:
        """The choice made of such a prompt; None if it is made by position, or all go on."""
        return None

    def online_rule(self, num_layers: int) -> OnlineRule | None:
        """The rule that finds the selecting layer during the pass; None if the layer is fixed."""
        return None

    @property
    def shared_prefix(self) -> SharedPrefix | None:
        """How requests share a prefix under this method; None if they cannot."""
        return None

    def check_retain(self, retain: "Retain") -> None:
        """Raise PolicyError if another method's retention cannot follow this propagation."""
        score, by = self.selects_by, retain.keeps_by
        if score is None:
            return
        if isinstance(by, Positions):
            raise PolicyError(
                f"{retain} goes by position, and which positions {self} computes in its upper "
                "layers is chosen by data: compose it with speed-K, or retain with snapkv"
            )
        if by.over_heads or by.decay is not None or retain.unit == "block":
            raise PolicyError(
                f"{self} and {retain} score keys differently: use structkv's own struct_rate and "
                "kv_rate, or retain with snapkv"
            )
        alike = score.family == by.family and score.decay is None
        if by.prompt_window not in (0, score.window) or (alike and by.kernel != score.kernel):
            raise PolicyError(
                f"{self} and {retain} score keys by different windows or kernels: give both the "
                "same window and kernel"
            )

    def check_retrieve(self, retrieve: "Retrieve") -> None:
        """Raise PolicyError if retrieval cannot follow this propagation."""


class Retain(Method, ABC):
    """Which computed KV entries stay in the cache? Answered when the prompt is in.

    unit: whether single entries stay, each KV head's own, or whole blocks, the same for all layers
        of a stage; blocks are not copied.
    """

    @property
    @abstractmethod
    def keeps_by(self) -> ScoreSpec | Positions:
        """What decides which entries stay. Every retention has an answer."""

    @property
    def unit(self) -> Literal["entry", "block"]:
        return "entry"

    def stages(self, num_layers: int) -> tuple[int, ...]:
        """The layers where another KV group has to begin, since counts differ from there on.

        No segment is compiled for them. PolicyError where a layer is not known yet.
        """
        return ()

    def ranked_after(self) -> int | None:
        """The layer after which whole blocks are ranked; None where entries stay."""
        return None

    @abstractmethod
    def kept(self, prompt_len: int, rows: int, layer: int, block_size: int, num_layers: int) -> int:
        """How many entries stay of the `rows` that `layer` computed of a prompt."""

    def num_drafted(self, prompt_len: int) -> int:
        """Tokens drafted behind such a prompt to score its keys; 0 where all of it stays."""
        return 0


class Retrieve(Method, ABC):
    """Which stored entries does this decode step read? Answered in every decode step.

    budget: tokens that a decode step reads for each KV head.
    reduction: how scores of the query heads that share a KV head become one.
    dense_below: contexts shorter than this are read whole; `auto` asks the machine and the batch.
    reuse_layers: layers that read by one choice: the first of so many that retrieve makes it.
    dense_layers: the first layers, which read everything.
    index_name: the row of ``indexes/table.py``. index_words: what it keeps, for messages: what
        there is one of for so many tokens.
    """

    budget: int
    reduction: str
    dense_below: int | str
    reuse_layers: int
    dense_layers: int
    index_name: ClassVar[str]
    index_words: ClassVar[str]

    @property
    @abstractmethod
    def index(self) -> IndexSpec:
        """The index that finds the entries to read."""

    @classmethod
    @abstractmethod
    def of_index(
        cls, group: int, budget: int, reduction: str, below: int | str, layers: RetrievalLayers
    ) -> "Retrieve":
        """The method of this class whose index has such groups. below: `dense_below`."""

    @property
    def retrieving(self) -> RetrievalLayers:
        """The layers that retrieve."""
        return RetrievalLayers(self.dense_layers, self.reuse_layers)

    @property
    def budget_units(self) -> int:
        """Units that a step reads."""
        return self.budget // self.index.unit

    def floor(self, crossover: int) -> int:
        """The least length of which every step reads a part, whoever else runs.

        A shorter one is read whole, but under `dense_below=auto` in steps whose batch pays.

        crossover: from where on retrieval pays on this machine, for `dense_below=auto` and budgets
            of up to a quarter of it; larger ones take longer to read. 0: everywhere.
        """
        if isinstance(self.dense_below, int):
            below = self.dense_below
        else:
            below = max(crossover, 4 * self.budget) if crossover else 0
        return max(self.budget + 1, below)
