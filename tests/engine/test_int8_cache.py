"""A KV cache of 8-bit integers with a scale for each token and head, against dense references.

The references round keys and values as such a cache does, token by token and head by head. A number
between two integers may be rounded either way by float32 sums in another order, which moves
logprobs: so nearly all are as near as without rounding, and not all.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.fier import Retrieve
from reference.masked import storing
from support import cpu_fp8, inside
from support.engine import Answer, running
from support.expected import FULL, Policy, Read, expect, load, named
from support.int8 import NAME, read_by_kernels, rounded
from support.nightly import by_day, nightly
from support.parity import ask, assert_close, in_turn, room_for
from support.prompts import prompt_of, prompts_of
from torch import Tensor

from vllm_kvx.server import validate
from vllm_kvx.worker.int8_cache import pieces

LAYERS = 4
READ, PAGES = Retrieve(32, group=32), Retrieve(64, group=32, pages=True)


@pytest.fixture
def model(tiny: Callable[..., Path]) -> Path:
    return tiny(layers=LAYERS)


def rounding(*exact: int) -> Callable[[int, int, Tensor], Tensor]:
    """What layers store; see ``reference.masked.storing``. exact: layers that skip the cache."""
    return lambda layer, _, entries: entries if layer in exact else rounded(entries)


def away(
    model: Path, answers: Sequence[Answer], policies: Sequence[Policy], store: Any
) -> dict[str, Tensor]:
    """By policy, how far logprobs are from its reference's, as far as choices are certain."""
    loaded, found = load(model), dict[str, list[Tensor]]()
    with storing(store):
        for answer, policy in zip(answers, policies, strict=True):
            expected = expect(loaded, answer.prompt, answer.tokens, policy)
            differs = (answer.logprobs - expected.logprobs).abs()
            found.setdefault(named(policy), []).append(differs[: max(expected.clear, 1)])
    return {name: torch.cat(each) for name, each in found.items()}


def assert_near(
    model: Path, answers: Sequence[Answer], policies: Sequence[Policy], *exact: int
) -> None:
    """Each policy is near its reference, and none is near one that rounds nothing."""
    for name, differs in away(model, answers, policies, rounding(*exact)).items():
        assert differs.median() < 1e-5 and differs.quantile(0.8) < 1e-3, (name, differs)
    pairs = sorted(zip(answers, policies, strict=True), key=lambda pair: len(pair[0].prompt))
    longest = {named(policy): (answer, policy) for answer, policy in pairs}
    some, theirs = zip(*longest.values(), strict=True)
    for name, differs in away(model, some, theirs, rounding(*range(LAYERS))).items():
        assert differs.median() > 1e-3, (name, differs)


@pytest.mark.parametrize("kernels", by_day([False, True], {0}), ids=["torch", "kernels"])
def test_chunks_prefixes_and_what_is_cut_off(
    model: Path, monkeypatch: pytest.MonkeyPatch, kernels: bool
) -> None:
    """Prompts in chunks beside each other, alone, and again after a hit; others are aborted.

    Contexts of more than 96 entries are read in slices. kernels: of rows that decode.
    """
    if kernels:
        read_by_kernels(monkeypatch)
    monkeypatch.setattr(pieces, "SLICE", 96)
    policies: list[Policy] = [FULL, Read(READ)]
    lengths = (2, 33, 64, 95, 300, 161, 257, 193)
    prompts, each = prompts_of(lengths), in_turn(policies, len(lengths))
    config = room_for(policies) | {"kv_recall_every": 3}
    options = {"kv_cache_dtype": NAME, "max_model_len": 512, "max_num_seqs": 16}
    with running(model, "full", config=config, enable_prefix_caching=True, **options) as engine:
        inside.fill_free_blocks(engine, 255)  # Scales of NaN, which nobody may read.
        # A checkpoint's, for an fp8 cache: these entries have scales of their own.
        inside.set_cache_scales(engine, key=0.25, value=3.0)
        answers = ask(engine, prompts, each, max_tokens=6)
        again = ask(engine, [[*prompt, 7, 8, 9] for prompt in prompts], each, max_tokens=4)
        # Cut elsewhere: the last chunk is one token, then one token behind a block's end.
        alone, cut = prompts_of((97, 193), seed=5), [named(Read(READ))] * 2
        whole = [engine.generate([p], policies=cut[:1], cache_salt="a")[0] for p in alone]
        beside = engine.generate(
            [prompt_of(70, seed=6), *alone], policies=["full", *cut], cache_salt="b"
        )
        gone = engine.submit(prompts_of((200, 40), seed=7), 50, [named(policies[1]), "full"])
        engine.step(4)
        engine.abort(gone)
        engine.assert_idle()
        stats = engine.stats()
    assert any(answer.cached for answer in again)
    assert_near(model, [*answers, *again, *whole], [*each, *each, Read(READ), Read(READ)])
    assert_close(whole, beside[1:])
    assert 0.2 < stats["retrieval"]["recall"] <= 1.001
    # Stock vLLM has two scales of 4 bytes with each entry, too; the 1-bit keys are ours.
    (group,) = stats["layout"]["groups"]
    entries, sidecar = 2 * 32 * (2 * 32 + 8), 2 * (32 * 4 + 2 * 32 * 2)
    assert group["block_size"] == 32
    ratio = stats["layout"]["pool_prompt_tokens"] / stats["layout"]["stock_pool_tokens"]
    assert ratio == pytest.approx(entries / (entries + sidecar), rel=1e-2)


def test_preempted_with_layers_that_skip(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that is too small: prompts come in anew, and generated tokens after them."""
    cpu_fp8.use(monkeypatch)  # For vLLM's CPU attention, in the layers that skip.
    over_int8 = [row for row in validate.OVER_INT8 if "skip-layers" not in row.reason]
    assert len(over_int8) == len(validate.OVER_INT8) - 1
    monkeypatch.setattr(validate, "OVER_INT8", over_int8)
    policies: list[Policy] = [FULL, Read(PAGES)]
    prompts = prompts_of((180, 150, 200, 170, 90, 129, 200, 155))
    each = in_turn(policies, len(prompts))
    options = {
        "kv_cache_dtype": NAME,
        "kv_cache_dtype_skip_layers": ["0", "1"],
        "max_model_len": 512,
        "num_gpu_blocks_override": 22,
    }
    with running(model, "full", config=room_for(policies), **options) as engine:
        answers = ask(engine, prompts, each, max_tokens=40)
        assert engine.preempted, "the pool was meant to be too small"
        engine.assert_idle()
        dtypes = inside.cache_dtypes(engine)
    assert dtypes == [torch.float32] * 2 + [torch.int8] * 2
    assert_near(model, answers, each, 0, 1)


@nightly
def test_two_ranks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has the scales of its own heads."""
    # vLLM binds one rank to a NUMA node unless told which cores to take.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    policies: list[Policy] = [FULL, Read(READ)]
    prompts, each = prompts_of((33, 97, 200, 150)), in_turn(policies, 4)
    options = {"kv_cache_dtype": NAME, "max_model_len": 512, "tensor_parallel_size": 2}
    with running(
        model, "full", config=room_for(policies), enable_prefix_caching=True, **options
    ) as engine:
        answers = ask(engine, prompts, each, max_tokens=6)
        again = ask(engine, [[*prompt, 7] for prompt in prompts], each, max_tokens=4)
        engine.assert_idle()
    assert any(answer.cached for answer in again)
    assert_near(model, [*answers, *again], each * 2)
