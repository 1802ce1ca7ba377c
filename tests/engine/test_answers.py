"""A gate: what every policy answers on the demo checkpoint, and that broken rules fail it.

The questions are the demo checkpoint's lookups, values of three words, in prompts of about 500
tokens. The first word follows from the prompt's own pass, and the others are found by decode steps
in what is kept or read. So a policy that loses everything still has a third of the words, unless it
loses the question.

The checkpoint looks words up in its layer 3. What layers above read of a prompt changes no answer:
a choice of tokens that go on is judged by `gemfilter`, which runs all layers over its choice.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
from support import inside
from support.engine import Engine, keep_in_process, running
from support.models import LOOKUP
from support.nightly import by_day

from vllm_kvx.policy.methods.table import METHODS
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.tools.tasks.prompts import EncodedSample, fitted
from vllm_kvx.tools.tasks.table import TASKS

TASK = TASKS["notes_3"]
WORDS = 3
LENGTH = 512
QUESTIONS = 5
# Tokens at the end that `streamingllm` keeps, within which the notes lie that it is asked for.
RECENT = 252

# Rules of choice as one might break them.
MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "lowest": inside.keep_lowest,
    "no window": inside.drop_windows,
    "wrong head": inside.shift_heads,
}
ALL = frozenset(MUTANTS)
ONE_CHOICE = ALL - {"wrong head"}  # All heads keep the same, so no head has another's.


@dataclass(frozen=True)
class Row:
    """What a policy answers.

    least, most: the share of words that are right. Healthy shares were 1.0 where `least` is 0.9,
        which allows for one wrong word of 15.
    caught: mutants under which the policy must fail.
    why: of bounds other than 0.9 and 1, and of mutants that are missing.
    late: asked for notes among the last RECENT tokens.
    """

    policy: str
    least: float = 0.9
    most: float = 1.0
    caught: frozenset[str] = ALL
    why: str = ""
    late: bool = False


# All of them cut the model at its middle: a server with few KV groups is quicker on CPU.
_ONE_BIT = (
    Row("full", caught=frozenset(), why="it chooses nothing"),
    Row("criticalkv:kv_rate=0.05,kv_floor=0"),
    Row("snapkv:kv_rate=0.05,kv_floor=0"),
    Row("fastkv:tsp_layer=3,kv_rate=0.05,kv_floor=0"),
    Row(
        "knorm:kv_rate=0.9,kv_floor=0",
        least=0.3,
        most=0.4,
        caught=frozenset({"lowest", "wrong head"}),
        why="it looks at no question and has no window; the notes' keys are this checkpoint's "
        "longest, so they are what it drops, and whoever keeps the longest answers all",
    ),
    Row(
        f"streamingllm:sinks=4,recent={RECENT}",
        caught=frozenset({"no window"}),
        why="it keeps by position",
        late=True,
    ),
    Row(
        "structkv:pivot=3,kv_rate=0.2,kv_floor=0",
        caught=ONE_CHOICE,
        why="all heads keep the same",
    ),
    Row("structkv:pivot=3,kv_rate=0.2,kv_floor=0,heads=own"),
    Row(
        "structkv:pivot=online,min_layer=3,max_layer=4,kv_rate=0.2,kv_floor=0",
        caught=ONE_CHOICE,
        why="all heads keep the same. Lower pivots choose before the checkpoint has looked "
        "anything up",
    ),
    Row(
        "structkv:pivot=3,granularity=block,kv_rate=0.5,kv_floor=0",
        caught=ONE_CHOICE,
        why="all heads have the same blocks",
    ),
    Row("gemfilter:layer=3,kv_floor=0", caught=ONE_CHOICE, why="all heads have the same tokens"),
    Row(
        "speed-4",
        caught=frozenset(),
        why="its tokens go on by position; with a cutoff of 3 no word is right",
    ),
    Row("swiftkv-4", caught=frozenset(), why="it chooses nothing"),
    Row("selfonly-4", caught=frozenset(), why="its tokens go on by position"),
    Row("fier-64:dense_below=0"),
    Row("structkv:pivot=3,kv_rate=1,kv_floor=0+snapkv:kv_rate=0.05,kv_floor=0"),
    Row("gemfilter:layer=3,rate=0.2,kv_floor=0,window=8,kernel=7+snapkv:kv_rate=0.05,kv_floor=0"),
    Row("snapkv:kv_rate=0.2,kv_floor=0+fier-64:dense_below=0"),
    Row("speed-4+fier-64:dense_below=0"),
)
_PAGE_BOUNDS = (
    Row("quest-128:page=32,dense_below=0"),
    Row("speed-4+quest-128:page=32,dense_below=0"),
    # It alone cuts the model in four.
    Row("pyramidkv:kv_rate=0.05,kv_floor=0,groups=4"),
)
# A server has one index.
ENGINES = {"one bit": _ONE_BIT, "page bounds": _PAGE_BOUNDS}
ROWS = (*_ONE_BIT, *_PAGE_BOUNDS)


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(LOOKUP)


@lru_cache(maxsize=2)
def questions(late: bool) -> tuple[EncodedSample, ...]:
    """Prompts, late: those whose note lies among the last RECENT tokens."""
    found: list[EncodedSample] = []
    seed = 0
    while len(found) < QUESTIONS:
        prompt = fitted(TASK, f"gate-{seed}", LENGTH, tokenizer())
        seed += 1
        if not late or prompt.evidence[0] > len(prompt.token_ids) - RECENT + 16:
            found.append(prompt)
    return tuple(found)


def shares(engine: Engine, rows: Sequence[Row]) -> dict[Row, float]:
    """The share of words that each policy has right; all policies in one batch."""
    asked = [(row, prompt) for row in rows for prompt in questions(row.late)]
    answers = engine.generate(
        [list(prompt.token_ids) for _, prompt in asked], WORDS, [row.policy for row, _ in asked]
    )
    total = dict.fromkeys(rows, 0.0)
    for (row, prompt), answer in zip(asked, answers, strict=True):
        total[row] += TASK.score(tokenizer().decode(answer.tokens), prompt.sample) / QUESTIONS
    return total


def failures(found: Mapping[Row, float]) -> list[str]:
    """The policies that answer less, or more, than they should; one sentence for each."""
    return [
        f"{row.policy}: {share:.3f} of the words are right, not {row.least} to {row.most}"
        + (f" ({row.why})" if row.why else "")
        for row, share in found.items()
        if not row.least - 1e-6 <= share <= row.most + 1e-6
    ]


@pytest.fixture(scope="module", params=ENGINES)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, tuple[Row, ...]]]:
    """An engine with room for all policies of its rows. Kernels are compared in tests/ops."""
    rows = ENGINES[request.param]
    with pytest.MonkeyPatch.context() as monkeypatch:
        keep_in_process(monkeypatch)
        inside.use_dense_ops(monkeypatch)
        options: dict[str, Any] = dict(
            max_model_len=LENGTH + 32,
            max_num_seqs=64,
            max_num_batched_tokens=4096,
            kv_cache_memory_bytes=384 << 20,
            config={"kv_layout": [row.policy for row in rows]},
        )
        with running(LOOKUP, "full", **options) as engine:
            yield engine, rows


def test_every_method_is_asked() -> None:
    named = {part.name for row in ROWS for part in parse_policy(row.policy).parts}
    assert named == set(METHODS), "a method needs a row"
    assert all(row.why for row in ROWS if (row.least, row.most, row.caught) != (0.9, 1.0, ALL))


def test_policies_answer(served: tuple[Engine, tuple[Row, ...]]) -> None:
    engine, rows = served
    assert not failures(shares(engine, rows))


@pytest.mark.parametrize("mutant", by_day(list(MUTANTS), {0}))
def test_broken_rules_fail(
    served: tuple[Engine, tuple[Row, ...]], mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, rows = served
    MUTANTS[mutant](monkeypatch)
    found = shares(engine, [row for row in rows if mutant in row.caught])
    survived = {row.policy: share for row, share in found.items() if not failures({row: share})}
    assert not survived, f"answer as before, though their rule is broken: {survived}"
