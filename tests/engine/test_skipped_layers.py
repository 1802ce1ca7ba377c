"""An fp8 KV cache that some layers skip, under policies of one stage, against dense references.

The fp8 layers run in torch on a CPU (``support/cpu_fp8.py``). The references round keys and values
of these layers as an fp8 cache does. A number that lies between two of fp8 may be rounded either
way by float32 sums in another order, which moves logprobs: so most are near, and not all.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.after import After
from reference.criticalkv import Critical
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.knorm import Norm
from reference.masked import storing
from support import cpu_fp8, inside
from support.engine import Answer, running
from support.expected import FULL, Policy, Read, expect, load, named
from support.nightly import by_day
from support.parity import ask, assert_identical, in_turn, room_for
from support.prompts import prompts_of
from torch import Tensor

LAYERS = 6
SKIPPED = ("0", "1", "4")  # Of those that retrieve, from 2 on, one skips.
KEPT, READ = Keep(kv_rate=0.3), Retrieve(32, group=32)
POLICIES: list[Policy] = [
    FULL,
    KEPT,
    Critical(kv_rate=0.3),
    Read(READ),
    Read(READ, KEPT),
    Norm(kv_rate=0.4),
    Keep(sinks=2, recent=30),
    After(KEPT, 3),
    Read(READ, After(KEPT, 3)),
]
PAGES = Retrieve(32, group=32, pages=True)
# Of keys and of values, as a checkpoint may bring them, for layers that skip too.
SCALES = (0.375, 0.625)


@pytest.fixture(autouse=True)
def fp8_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_fp8.use(monkeypatch)


@pytest.fixture
def model(tiny: Callable[..., Path]) -> Path:
    return tiny(layers=LAYERS)


def over_fp8(skipped: Sequence[str] = SKIPPED, **options: Any) -> dict[str, Any]:
    return {
        "kv_cache_dtype": "fp8",
        "kv_cache_dtype_skip_layers": list(skipped),
        "max_model_len": 512,
        **options,
    }


def rounds(skipped: Sequence[str], scaled: bool = False) -> Callable[[int, int, Tensor], Tensor]:
    """What layers store of keys (0) and of values (1); see ``reference.masked.storing``."""

    def store(layer: int, which: int, entries: Tensor) -> Tensor:
        if str(layer) in skipped:
            return entries
        scale = SCALES[which] if scaled else 1.0
        return cpu_fp8.rounded_to_codes(entries / scale).float() * scale

    return store


def away(
    model: Path,
    answers: Sequence[Answer],
    policies: Sequence[Policy],
    store: Callable[[int, int, Tensor], Tensor],
    clear: bool = False,
) -> dict[str, Tensor]:
    """By policy, how far logprobs are from its reference's.

    clear: only up to the first choice that is uncertain, where decode steps choose.
    """
    loaded, found = load(model), dict[str, list[Tensor]]()
    with storing(store):
        for answer, policy in zip(answers, policies, strict=True):
            expected = expect(loaded, answer.prompt, answer.tokens, policy)
            differs = (answer.logprobs - expected.logprobs).abs()
            if clear and isinstance(policy, Read):
                differs = differs[: max(expected.clear, 1)]
            found.setdefault(named(policy), []).append(differs)
    return {name: torch.cat(each) for name, each in found.items()}


def assert_near(
    model: Path,
    answers: Sequence[Answer],
    policies: Sequence[Policy],
    skipped: Sequence[str] = SKIPPED,
    scaled: bool = False,
) -> None:
    """Each policy is near its reference, and none is near one that rounds all layers, or none."""
    near = away(model, answers, policies, rounds(skipped, scaled), clear=True)
    for name, differs in near.items():
        assert differs.median() < 0.004 and differs.quantile(0.75) < 0.03, (name, differs)
    # The longest of each tell most.
    pairs = sorted(zip(answers, policies, strict=True), key=lambda pair: len(pair[0].prompt))
    longest = {named(policy): (answer, policy) for answer, policy in pairs}
    some, theirs = zip(*longest.values(), strict=True)
    every = [str(layer) for layer in range(LAYERS)]
    for wrong in (rounds((), scaled), rounds(every)):
        for name, differs in away(model, some, theirs, wrong).items():
            assert differs.median() > max(0.005, 3 * near[name].median()), (name, differs)


def test_chunks_in_one_batch_and_from_the_prefix_cache(model: Path) -> None:
    """Each policy with a prompt of one block and of several chunks; then longer, after a hit."""
    lengths = (2, 33, 64, 95, 300, 161, 257, 290, 170, 129, 200, 97, 310, 180, 128, 193, 96, 240)
    prompts, policies = prompts_of(lengths), in_turn(POLICIES, len(lengths))
    options = over_fp8(enable_prefix_caching=True, max_num_seqs=16)
    with running(model, "full", config=room_for(POLICIES), **options) as engine:
        inside.set_cache_scales(engine, *SCALES)
        answers = ask(engine, prompts, policies, max_tokens=6)
        again = ask(engine, [[*prompt, 7, 8, 9] for prompt in prompts], policies, max_tokens=4)
        engine.assert_idle()
        dtypes = inside.cache_dtypes(engine)
    assert [str(i) for i, dtype in enumerate(dtypes) if dtype == torch.float32] == [*SKIPPED]
    assert any(answer.cached for answer in again)
    assert_near(model, [*answers, *again], policies * 2, scaled=True)


@pytest.mark.parametrize("retrieve", by_day([READ, PAGES], {0}), ids=["fier", "quest"])
def test_preempted(model: Path, retrieve: Retrieve) -> None:
    """A pool that is too small: prompts come in anew, and generated tokens after them."""
    policies: list[Policy] = [FULL, Critical(kv_rate=0.3), Read(retrieve, KEPT), Read(retrieve)]
    prompts = prompts_of((180, 150, 200, 170, 90, 129, 200, 155))
    each = in_turn(policies, len(prompts))
    options = over_fp8(num_gpu_blocks_override=22, max_num_seqs=8)
    with running(model, "full", config=room_for(policies), **options) as engine:
        answers = ask(engine, prompts, each, max_tokens=40)
        assert engine.preempted, "the pool was meant to be too small"
        engine.assert_idle()
    assert_near(model, answers, each)


def test_full_is_stock(model: Path) -> None:
    """Bit for bit, on a server that retains and retrieves."""
    prompts, options = prompts_of((2, 97, 200)), over_fp8()
    with running(model, None, **options) as engine:
        stock = engine.generate(prompts, max_tokens=6)
    with running(model, "full", config=room_for(POLICIES), **options) as engine:
        assert_identical(engine.generate(prompts, max_tokens=6), stock)
        layout = engine.stats()["layout"]
    # A page of float32 is four of fp8, and 1-bit keys and their scales are as large beside each.
    (group,) = layout["groups"]
    assert len(group["layers"]) == LAYERS and group["block_size"] == 32
    entries, sidecar = 2 * 2 * 32 * 32, 2 * (32 * 4 + 2 * 32 * 2)
    whole = entries * (3 * 4 + 3 * 1)
    ratio = layout["pool_prompt_tokens"] / layout["stock_pool_tokens"]
    assert ratio == pytest.approx(whole / (whole + LAYERS * sidecar), rel=1e-2)
