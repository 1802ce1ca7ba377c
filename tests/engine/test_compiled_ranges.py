"""Passes run the stock decoder's compiled pieces, and nothing is compiled for them.

vLLM's CPU platform compiles in another way than its GPUs do, and Triton's interpreter stands in for
a compiler. So here decoders are compiled as on GPUs, ahead of time and split at attention, but with
pieces that run as they are (vLLM's backend "eager").
"""

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import fastkv, hybrids, wrappers
from reference.fier import Retrieve
from support import pictures
from support.cpu_hybrids import complete_cpu_hybrids
from support.engine import Engine, running
from support.expected import FULL, Policy, Read, Speed
from support.nightly import by_day, nightly
from support.parity import ask, assert_close, assert_parity, room_for
from support.prompts import prompts_of
from torch import Tensor
from vllm.forward_context import set_forward_context

from vllm_kvx.models.compiled_ranges import CompiledRanges
from vllm_kvx.models.segment import DecoderSegment
from vllm_kvx.models.stream import Stream

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs compile by themselves")

LENGTHS = (200, 33, 97, 150)
# Most of a start is dynamo's, by the layer.
LAYERS = 5
COMPILED: dict[str, Any] = {"enforce_eager": False}


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Decoders are compiled as on GPUs, unless engines are asked not to."""
    from vllm import envs
    from vllm.compilation import backends
    from vllm.compilation.compiler_interface import EagerAdaptor
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.platforms.cpu import CpuPlatform

    from vllm_kvx.server import validate

    stock = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        stock(cls, vllm_config)
        compilation = vllm_config.compilation_config
        if compilation.mode is CompilationMode.NONE:
            return
        compilation.mode, compilation.backend = CompilationMode.VLLM_COMPILE, "inductor"
        compilation.cudagraph_mode, compilation.compile_sizes = CUDAGraphMode.NONE, []
        compilation.splitting_ops = None

    monkeypatch.setattr(
        CpuPlatform, "check_and_update_config", classmethod(check_and_update_config)
    )
    others = [each for each in validate.ALWAYS if "torch.compile" not in each.reason]
    monkeypatch.setattr(validate, "ALWAYS", tuple(others))
    monkeypatch.setattr(backends, "make_compiler", lambda *_, **__: EagerAdaptor())
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    # As with the torch that vLLM has on GPUs; and there is nothing compiled to be kept.
    monkeypatch.setenv("VLLM_USE_MEGA_AOT_ARTIFACT", "0")
    envs.disable_envs_cache()
    with torch._dynamo.config.patch(disable=False):
        yield
    envs.disable_envs_cache()


@pytest.fixture
def no_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """No segment runs."""

    def run(*_: Any) -> None:
        raise AssertionError("a segment runs")

    monkeypatch.setattr(DecoderSegment, "run", run)


def model_of(engine: Engine) -> Any:
    (model,) = engine.llm.apply_model(lambda model: model)
    return model


def ranges_of(engine: Engine) -> CompiledRanges | None:
    found: CompiledRanges | None = model_of(engine).compiled_ranges
    return found


# Through the engine.

KINDS: dict[str, tuple[str, list[Policy]]] = {
    "speed": ("llama", [Speed(2), FULL, Speed(4, 3, 2)]),
    "fastkv": ("qwen2", [fastkv.Keep(tsp_layer=3, tsp_rate=0.2, kv_rate=0.1), FULL]),
}


@pytest.mark.usefixtures("no_segments", "dense_ops")
@pytest.mark.parametrize("kind", KINDS)
def test_parity(tiny: Callable[..., Path], kind: str) -> None:
    arch, kinds = KINDS[kind]
    model = tiny(arch, layers=LAYERS)
    policies = [kinds[i % len(kinds)] for i in range(2 * len(LENGTHS))]
    prompts = prompts_of((*LENGTHS, *LENGTHS))
    with running(model, "full", config=room_for(kinds), **COMPILED) as engine:
        answers = ask(engine, prompts, policies, max_tokens=6)
        assert ranges_of(engine) is not None
        engine.assert_idle()
    assert_parity(model, answers, policies, most=0)


@pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's code of it imports that")
@pytest.mark.usefixtures("no_segments", "dense_ops")
@pytest.mark.parametrize("name", by_day(["qwen3_vl", "qwen2_5_vl"], ()))
def test_parity_with_rows_of_positions(tmp_path: Path, name: str) -> None:
    """Compiled pieces read them as they lie in vLLM's own buffer."""
    kinds = [Speed(4), FULL, fastkv.Keep(tsp_layer=3, tsp_rate=0.2, kv_rate=0.1)]
    model, prompts = wrappers.build(tmp_path / "model", name), prompts_of(LENGTHS)
    policies = [kinds[i % len(kinds)] for i in range(len(prompts))]
    options = COMPILED | {"max_model_len": 512}
    with running(model, "full", config=room_for(kinds), **options) as engine:
        answers = ask(engine, prompts, policies, max_tokens=6)
        assert ranges_of(engine) is not None
        engine.assert_idle()
    assert_parity(model, answers, policies, most=0)


@nightly
@pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's code of it imports that")
@pytest.mark.usefixtures("dense_ops")
def test_images(tmp_path: Path) -> None:
    """A whole compiled decoder takes the embeddings of images, and adds what these leave to it."""
    name = "qwen3_vl"
    kinds: list[Policy] = [fastkv.Keep(kv_rate=0.2), FULL, Read(Retrieve(64))]
    model = wrappers.add_processor(wrappers.build(tmp_path / "model", name), name)
    shown = [pictures.Shown.of(name, 20 + i, (7, 9, i), 60, seed=i) for i in range(3)]
    options = COMPILED | {"max_model_len": 512, "skip_tokenizer_init": False}
    with running(model, "full", config=room_for(kinds), **options) as engine:
        answers = pictures.ask(engine, shown, kinds, 6)
        engine.assert_idle()
    pictures.assert_parity_shown(model, shown, answers, kinds)


@nightly
@pytest.mark.usefixtures("no_segments", "dense_ops")
@pytest.mark.parametrize("name", ["gemma3_text", "exaone4"])
def test_parity_where_layers_slide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    complete_cpu_hybrids(monkeypatch)
    kinds: list[Policy] = [Speed(5), Speed(), Speed(4, 3, 2)]
    model, prompts = hybrids.build(tmp_path / "model", name), prompts_of(LENGTHS)
    policies = [kinds[i % len(kinds)] for i in range(len(prompts))]
    options = COMPILED | {"max_model_len": 512}
    with running(model, "full", config=room_for(kinds), **options) as engine:
        answers = ask(engine, prompts, policies, max_tokens=6)
        assert ranges_of(engine) is not None
        engine.assert_idle()
    assert_parity(model, answers, policies, most=0)


@pytest.mark.usefixtures("dense_ops")
@pytest.mark.parametrize(
    ("arch", "policy"),
    by_day(
        [
            ("qwen3", "structkv:pivot=online,kv_floor=0"),
            ("mistral", "gemfilter:layer=3,rate=0.4,kv_floor=0"),
            ("llama", "swiftkv-3"),
            ("qwen3", "speed-3+snapkv:kv_floor=0"),
        ],
        {2},
    ),
)
def test_same_answers_as_without_a_compiler(
    tiny: Callable[..., Path], arch: str, policy: str
) -> None:
    model, prompts = tiny(arch, layers=LAYERS), prompts_of(LENGTHS)
    with running(model, policy) as engine:
        eager = engine.generate(prompts, max_tokens=6)
        assert ranges_of(engine) is None
    with running(model, policy, **COMPILED) as engine:
        engine_ranges = ranges_of(engine)
        answers = engine.generate(prompts, max_tokens=6)
        engine.assert_idle()
    assert engine_ranges is not None
    assert_close(answers, eager)


@pytest.mark.usefixtures("no_segments")
def test_from_the_cache_of_an_earlier_start(tiny: Callable[..., Path]) -> None:
    model, prompts = tiny(layers=LAYERS), prompts_of(LENGTHS)
    answers, loaded = [], []
    for _ in range(2):
        with running(model, "speed-2", **COMPILED) as engine:
            answers.append(engine.generate(prompts, max_tokens=4))
            loaded.append(model_of(engine).model.was_aot_compile_fn_loaded_from_disk)
            assert ranges_of(engine) is not None
    assert loaded == [False, True]
    assert_close(*answers)


@pytest.mark.parametrize("switch", by_day(["kv_disable", "VLLM_USE_AOT_COMPILE"], {0}))
def test_segments_where_there_are_no_compiled_ranges(
    tiny: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    switch: str,
) -> None:
    from vllm_kvx.models import decoder

    said: list[str] = []
    monkeypatch.setattr(decoder.logger, "warning", lambda text, *of: said.append(text % of))
    config = {"kv_disable": ["compiled_ranges"]} if switch == "kv_disable" else {}
    if not config:
        monkeypatch.setenv(switch, "0")
    model, prompts = tiny(layers=LAYERS), prompts_of(LENGTHS)
    with running(model, "speed-2", config=config, **COMPILED) as engine:
        assert ranges_of(engine) is None
        answers = engine.generate(prompts, max_tokens=4)
        engine.assert_idle()
    assert_parity(model, answers, Speed(2), most=0)
    if config:
        assert not said
    else:
        assert len(said) == 1 and "VLLM_USE_AOT_COMPILE" in said[0]


# By themselves, with attention among the rows of a pass.


def attend(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, output: Tensor, **__: Any
) -> Tensor:
    """Causal attention among the rows."""
    parts = (part.transpose(0, 1)[None] for part in (query, key, value))
    out = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
    return output.view_as(query).copy_(out[0].transpose(0, 1))


def run_segments(model: Any, edges: Sequence[int], ids: Tensor, positions: Tensor) -> Any:
    """Layers between `edges`, as they are; yields each range's output and is sent the rows."""
    states: Any = (None, None)
    for first, last in pairwise(edges):
        segment = DecoderSegment(
            vllm_config=model.model.vllm_config, ranges=model.ranges, start=first, end=last
        )
        with torch._dynamo.config.patch(disable=True), model.ranges.as_stage(first, last):
            out = segment.run(ids, positions, *states)
        if last < len(model.model.layers):
            rows = yield out
            states = tuple(part[rows] for part in out)
            positions = positions[rows]
        else:
            yield out


@pytest.mark.usefixtures("dense_ops")
@pytest.mark.parametrize("arch", by_day(["llama", "mistral", "qwen2", "qwen3"], {3}))
def test_ranges(tiny: Callable[..., Path], arch: str) -> None:
    with running(tiny(arch), "speed-4", **COMPILED) as engine:
        model = model_of(engine)
        ranges, config = ranges_of(engine), engine.llm.llm_engine.vllm_config
        assert ranges is not None
        for layer in model.attention_layers():
            layer.impl.forward = attend
        for count in (96, 33, 2, 1):
            ids = torch.arange(3, 3 + count, dtype=torch.int32)
            at = torch.arange(7, 7 + count)
            context = set_forward_context(None, config, num_tokens=count, slot_mapping={})
            with torch.inference_mode(), context:
                check_ranges(model, ranges, ids, at)


def check_ranges(model: Any, ranges: CompiledRanges, ids: Tensor, at: Tensor) -> None:
    stock = model.model(ids, at, None, None)

    # One after the other, they are the stock decoder.
    for edges in ([0, 8], [0, 3, 8], [0, 1, 2, 5, 7, 8]):
        out: Any = None
        for first, last in pairwise(edges):
            taken = out
            out = ranges.run(first, last, None if first else ids, at, taken)
            assert taken is None or (taken.terms == () and taken.projected is None)
        assert torch.equal(out, stock)
    assert torch.equal(model.model(ids, at, None, None), stock)

    # From the sum of states, without what the next layer takes of them.
    below = ranges.run(0, 5, ids, at, None)
    assert isinstance(below, Stream)
    out = ranges.run(5, 8, None, at, Stream((below.sum(),)))
    torch.testing.assert_close(out, stock, atol=1e-5, rtol=1e-5)

    # Rows leave at two cuts.
    rows = torch.arange(0, len(ids), 3), torch.arange(0, (len(ids) + 2) // 3, 2)
    layers = run_segments(model, [0, 3, 6, 8], ids, at)
    expected, now, out = next(layers), at, None
    for (first, last), kept in zip(pairwise([0, 3, 6]), rows, strict=True):
        out = ranges.run(first, last, None if first else ids, now, out)
        torch.testing.assert_close(out.sum(), sum(expected), atol=1e-5, rtol=1e-5)
        assert torch.equal(out.sum(kept), out.sum()[kept])
        out, now, expected = out.select(kept), now[kept], layers.send(kept)
    out = ranges.run(6, 8, None, now, out)
    assert len(out) == len(now)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
