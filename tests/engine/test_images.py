"""Prompts with images under policies that retain or retrieve: against the dense references.

The references run the layers of transformers' own model on what its encoder makes of the images.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from reference.after import After
from reference.criticalkv import Critical
from reference.fastkv import Keep
from reference.fier import Retrieve
from reference.knorm import Norm
from reference.pyramidkv import Pyramid
from reference.wrappers import IMAGE, WRAPPERS, add_processor, build
from support import inside
from support.cpu_encoders import spare_position_kernel
from support.engine import Answer, Engine, running, schedule_ahead
from support.expected import FULL, Policy, Read, named
from support.nightly import by_day, nightly
from support.parity import assert_identical, room_for
from support.pictures import Shown, ask, assert_parity_shown, serving

from vllm_kvx.cache.admission import SPLIT_WINDOWS

pytestmark = [
    pytest.mark.skipif(
        find_spec("torchvision") is None,
        reason="torchvision is missing: `bash tests/run.sh` sets it up",
    ),
    pytest.mark.usefixtures("dense_ops"),
]

POLICIES: list[Policy] = [
    Keep(kv_rate=0.2),
    Read(Retrieve(64)),
    FULL,
    Critical(kv_rate=0.3),
    Pyramid(kv_rate=0.3, groups=4),
    Norm(kv_rate=0.3),
    Keep(sinks=4, recent=24),
    Read(Retrieve(64), Keep(kv_rate=0.6)),
    After(Keep(kv_rate=0.2), 3),
]
NAMES = list(WRAPPERS)
# The one by day has three rows of positions, and adds what images leave to its first layers.
every = pytest.mark.parametrize("name", by_day(NAMES, {NAMES.index("qwen3_vl")}))


@pytest.fixture(autouse=True)
def quick_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    spare_position_kernel(monkeypatch)


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = add_processor(build(tmp_path_factory.mktemp(name), name), name)
        return made[name]

    return of


def prompts_for(name: str) -> list[Shown]:
    """One for each policy: with images and without, several in one, and one within the window."""
    return [
        Shown.of(name, 20, (7, 9, 0), 60, seed=1),
        Shown.of(name, 40, (6, 8, 1), 50, seed=2),
        Shown.of(name, 30, (3, 5, 2), 70, (9, 8, 3), 20, seed=3),
        Shown.of(name, 5, (10, 10, 4), 30, seed=4),
        Shown.of(name, 90, (7, 9, 5), 12, seed=5),
        Shown.of(name, 33, (7, 9, 6), 64, seed=6),
        Shown.of(name, 64, (8, 8, 8), 40, seed=8),
        Shown.of(name, 20, (9, 9, 9), 60, seed=9),
        Shown.of(name, 120, (1, 3, 1), 2, seed=10),
    ]


@every
def test_parity(wrapper: Callable[[str], Path], name: str) -> None:
    """In chunks beside texts; over cached prefixes; and thrown out amid an image, and later."""
    model, shown = wrapper(name), prompts_for(name)
    texts = [Shown.of(name, count, seed=20 + count) for count in (97, 140)]
    each = [*POLICIES, *POLICIES[:2]]
    with serving(model, POLICIES) as engine:
        answers = ask(engine, [*shown, *texts], each, 6)
        again = ask(engine, [*shown, *texts], each, 4)
        others = [one._replace(images=other_pixels(one)) for one in shown]
        unlike = ask(engine, others, POLICIES, 2)
        assert_thrown_out(engine, shown, answers)
        engine.assert_idle()
    assert_shared(again, unlike)
    options: dict[str, Any] = {}
    if name == "mistral3":  # The two encoders round differently.
        options["near_tie"] = 1e-4
    asked = [*shown, *texts] * 2 + others
    assert_parity_shown(model, asked, [*answers, *again, *unlike], each * 2 + POLICIES, **options)


def other_pixels(shown: Shown) -> tuple[tuple[int, int, int], ...]:
    return tuple((rows, columns, seed + 50) for rows, columns, seed in shown.images)


def assert_shared(again: list[Answer], unlike: list[Answer]) -> None:
    """Prefixes end within images and behind them; other pixels behind the same text share none."""
    within = behind = before = 0
    for same, other in zip(again, unlike, strict=False):
        assert same.prompt == other.prompt
        at = [i for i, token in enumerate(same.prompt) if token == IMAGE]
        within += at[0] < same.cached <= at[-1]
        behind += same.cached > at[-1]
        assert other.cached <= at[0]
        before += other.cached > 0
    assert within and behind and before


def assert_thrown_out(engine: Engine, shown: list[Shown], answers: list[Answer]) -> None:
    """Preempted amid an image, and once more where they decode, requests end as they did before."""
    engine.llm.reset_prefix_cache()
    ids = engine.submit(
        [each.prompt for each in shown],
        6,
        [named(policy) for policy in POLICIES],
        images=[each.pixels() for each in shown],
    )
    engine.step(2)
    engine.throw_out()
    while not any(request.num_output_tokens > 2 for request in engine.scheduler.running):
        engine.step()
    engine.throw_out()
    engine.finish()
    assert any(one.generated for one in engine.preempted)
    assert any(0 < one.computed < one.prompt_len for one in engine.preempted)
    for request_id, answer in zip(ids, answers, strict=False):
        assert engine.answered[request_id] == answer.tokens


def test_no_room_for_an_encoder_s_output(wrapper: Callable[[str], Path]) -> None:
    """A step that ends before an image, since others fill the encoder's cache, splits no window.

    More prompts wait within theirs than may at once.
    """
    name, policy = "qwen3_vl", Keep(kv_rate=0.5)
    model = wrapper(name)
    # The largest image that its processor makes: all that the cache holds.
    shown = [Shown.of(name, 4, (16, 16, 0), 20, seed=1)]
    shown += [Shown.of(name, 10, (1, 1, i), 2, seed=10 + i) for i in range(SPLIT_WINDOWS + 2)]
    policies: list[Policy] = [policy] * len(shown)
    with serving(model, policies, long_prefill_token_threshold=32) as engine:
        free = inside.watch_free_windows(engine)
        answers = ask(engine, shown, policies, 3)
        engine.assert_idle()
    assert min(free) == 0
    assert_parity_shown(model, shown, answers, policies)


@every
def test_full_is_stock(wrapper: Callable[[str], Path], name: str) -> None:
    """Bit for bit, with images, beside policies."""
    model, shown = wrapper(name), prompts_for(name)[:4]
    each: list[Policy] = [FULL] * len(shown)
    options: dict[str, Any] = {"skip_tokenizer_init": False, "max_model_len": 512}
    with running(model, None, **options) as engine:
        stock = [engine.generate([one.prompt], 6, images=[one.pixels()])[0] for one in shown]
    with running(model, "full", config=room_for(POLICIES), **options) as engine:
        ours = [ask(engine, [one], [FULL], 6)[0] for one in shown]
        engine.assert_idle()
    assert_identical(ours, stock)
    assert_parity_shown(model, shown, ours, each)


@nightly
def test_pages(wrapper: Callable[[str], Path]) -> None:
    """Quest, which has another sidecar."""
    model, shown = wrapper("qwen2_5_vl"), prompts_for("qwen2_5_vl")
    policies: list[Policy] = [Read(Retrieve(64, pages=True))]
    policies.append(Read(Retrieve(64, pages=True), Keep(kv_rate=0.6)))
    each = [policies[i % 2] for i in range(len(shown))]
    with serving(model, policies) as engine:
        answers = ask(engine, shown, each, 6)
        engine.assert_idle()
    assert_parity_shown(model, shown, answers, each)


@nightly
@pytest.mark.parametrize("is_async", [False, True])
def test_preempted(
    wrapper: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """A pool that is too small, with steps planned ahead and without."""
    schedule_ahead(monkeypatch, is_async)
    model, shown = wrapper("qwen3_vl"), prompts_for("qwen3_vl")
    with serving(model, POLICIES, num_gpu_blocks_override=80) as engine:
        answers = ask(engine, shown, POLICIES, 40)
        assert engine.preempted, "the pool was meant to be too small"
        engine.assert_idle()
    assert_parity_shown(model, shown, answers, POLICIES)
