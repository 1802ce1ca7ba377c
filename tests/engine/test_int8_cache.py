"""A KV cache of 8-bit integers with a scale for each token and head, against dense references.

The references round keys and values as such a cache does, token by token and head by head. A number
between two integers may be rounded either way by float32 sums in another order, which moves
logprobs: so nearly all are as near as without rounding, and not all.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from reference.fier import Retrieve
from reference.wrappers import add_processor, build
from support import cpu_fp8, inside, pictures
from support.adapters import Adapters
from support.cpu_encoders import spare_position_kernel
from support.engine import Answer, running
from support.expected import FULL, Policy, Read, named
from support.int8 import NAME, read_by_kernels
from support.int8_answers import AS_IT_IS, away, rounding
from support.nightly import by_day, nightly
from support.parity import ask, assert_close, in_turn, room_for
from support.pictures import Shown
from support.prompts import prompt_of, prompts_of

from vllm_kvx.server import validate
from vllm_kvx.worker.int8_cache import pieces

LAYERS = 4
READ, PAGES = Retrieve(32, group=32), Retrieve(64, group=32, pages=True)


@pytest.fixture
def model(tiny: Callable[..., Path]) -> Path:
    return tiny(layers=LAYERS)


def assert_near(
    model: Path,
    answers: Sequence[Answer],
    policies: Sequence[Policy],
    *exact: int,
    median: float = 1e-5,
    shown: Mapping[int, Shown] = MappingProxyType({}),
) -> None:
    """Each policy is near its reference, and none is near one that rounds nothing.

    exact: layers that skip the cache. median: below which half of the logprobs are off. One number
        that is rounded the other way moves all logprobs of its prompt: more prompts have some
        where what is stored was itself summed up in another order. shown: the prompts with images,
        by the answers' places.
    """
    for name, differs in away(model, answers, policies, rounding(*exact), shown).items():
        assert differs.median() < median and differs.quantile(0.8) < 1e-3, (name, differs)
    pairs = sorted(enumerate(answers), key=lambda pair: len(pair[1].prompt))
    longest = {named(policies[i]): i for i, _ in pairs}.values()
    some, theirs = [answers[i] for i in longest], [policies[i] for i in longest]
    images = {place: shown[i] for place, i in enumerate(longest) if i in shown}
    for name, differs in away(model, some, theirs, AS_IT_IS, images).items():
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


def test_adapters(model: Path, tmp_path: Path) -> None:
    """Adapters and none in one batch, in chunks and after hits, as merged checkpoints answer."""
    adapters = Adapters(model, tmp_path, 2)
    policies: list[Policy] = [FULL, Read(READ)]
    prompts, theirs = prompts_of((33, 97, 200, 150, 64, 130)), in_turn(policies, 6)
    each = [adapter for adapter in adapters for _ in policies]
    names = [named(policy) for policy in theirs]
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_model_len": 512}
    options |= {"kv_cache_dtype": NAME, "enable_prefix_caching": True}
    with running(model, "full", config=room_for(policies), **options) as engine:
        answers = engine.generate(prompts, 6, names, adapters=each)
        longer = [[*prompt, 7] for prompt in prompts]
        again = engine.generate(longer, 4, names, adapters=each)
        # Another adapter finds nothing of what these left.
        others = engine.generate(prompts[-2:], 1, names[-2:], adapters=[None] * 2)
        engine.assert_idle()
    assert sum(answer.cached > 0 for answer in again) > 3
    assert not any(answer.cached for answer in others)
    for adapter, merged in adapters.items():
        here = [i for i, other in enumerate(each * 2) if other == adapter]
        found = [[*answers, *again][i] for i in here]
        assert_near(merged, found, [(theirs * 2)[i] for i in here], median=5e-4)


@pytest.mark.skipif(
    find_spec("torchvision") is None,
    reason="torchvision is missing: `bash tests/run.sh` sets it up",
)
def test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with images beside texts, cut amid an image, and again after hits within one."""
    spare_position_kernel(monkeypatch)
    name = "qwen3_vl"
    model = add_processor(build(tmp_path / name, name), name)
    policies: list[Policy] = [FULL, Read(READ)]
    shown = [
        Shown.of(name, 20, (7, 9, 0), 60, seed=1),
        Shown.of(name, 30, (3, 5, 2), 70, (9, 8, 3), 20, seed=3),
        Shown.of(name, 97, seed=20),
        Shown.of(name, 90, (7, 9, 5), 12, seed=5),
    ]
    each = in_turn(policies, len(shown))
    with pictures.serving(model, policies, kv_cache_dtype=NAME) as engine:
        answers = pictures.ask(engine, shown, each, 6)
        again = pictures.ask(engine, shown, each[::-1], 4)
        engine.assert_idle()
    assert all(answer.cached for answer in again)
    with_images = {i: one for i, one in enumerate(shown * 2) if one.images}
    theirs = [*each, *each[::-1]]
    assert_near(model, [*answers, *again], theirs, median=5e-4, shown=with_images)


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
