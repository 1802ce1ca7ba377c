"""FIER and Quest against the dense float32 reference, on vLLM's own engine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from reference.fier import Retrieve
from support.engine import running
from support.expected import Read, Speed, named
from support.nightly import by_day
from support.parity import assert_identical, assert_parity
from support.prompts import prompts_of

from vllm_kvx.ops.retrieval.costs import (
    COSTS,
    IN_ENGINE_US,
    KI,
    ONE_LAUNCH,
    ONE_LAUNCH_IN_ENGINE_US,
    Costs,
)
from vllm_kvx.ops.retrieval.crossover import CROSSOVERS
from vllm_kvx.ops.retrieval.retrieve import Scratch
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.worker.decode import retrieval

# Around the edges of groups, blocks, chunks and the budgets of 64, 100 and 128.
LENGTHS = (2, 33, 62, 63, 64, 65, 66, 95, 97, 98, 99, 101, 126, 127, 128, 129, 190, 257, 400)


@pytest.mark.parametrize(
    ("arch", "options", "retrieve"),
    by_day(
        [
            ("llama", {}, Retrieve(64)),
            ("mistral", {"kv_heads": 4}, Retrieve(64, reduction="sum", reuse_layers=2)),
            ("qwen2", {"kv_heads": 1}, Retrieve(64, reduction="softmax")),
            ("qwen3", {"head_dim": 64}, Retrieve(64, group=64)),
            ("llama", {}, Retrieve(32)),
            ("llama", {}, Retrieve(256, group=256)),
            ("qwen2", {}, Retrieve(32, group=32, pages=True)),
            (
                "llama",
                {"kv_heads": 1, "heads": 8},
                Retrieve(64, group=16, pages=True, reuse_layers=3),
            ),
            ("llama", {}, Retrieve(64, dense_layers=0)),
            ("llama", {}, Retrieve(64, group=16, pages=True, reuse_layers=2, dense_layers=1)),
        ],
        {1, 2, 3, 5, 7, 8},
    ),
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_budgets_in_one_batch(
    tiny: Callable[..., Path], arch: str, options: dict[str, int], retrieve: Retrieve
) -> None:
    """In chunks, with `full` beside them; budgets of whole pages and not, and short contexts."""
    model = tiny(arch, **options)
    widest = replace(retrieve, budget=2 * retrieve.budget)
    size = max(retrieve.group, 32)
    policies = [
        retrieve,
        None,
        replace(retrieve, budget=retrieve.budget * 3 // 2 + 4),
        widest,
        replace(retrieve, dense_below=150),
    ]
    prompts = prompts_of(LENGTHS)
    ours = [policies[i % len(policies)] for i in range(len(prompts))]
    names = ["full" if one is None else named(Read(one)) for one in ours]
    options = dict(max_num_seqs=20, max_num_batched_tokens=200)
    with running(model, named(Read(widest)), block_size=size, **options) as engine:
        answers = engine.generate(prompts, max_tokens=5, policies=names)
        engine.assert_idle()
    reads = [Read(one) for one in ours if one is not None]
    assert_parity(model, [a for a, o in zip(answers, ours, strict=True) if o], reads)
    assert_parity(model, [a for a, o in zip(answers, ours, strict=True) if not o], Speed())


def test_one_shot_and_budgets_of_all(tiny: Callable[..., Path]) -> None:
    """Answers that cross groups, in a batch and alone; a budget that all fits into is `full`."""
    model = tiny()
    prompts = prompts_of((60, 63, 64, 90, 96, 127))
    with running(model, "fier-256", max_num_batched_tokens=2304) as engine:
        together = engine.generate(prompts, max_tokens=34, policies=["fier-64"] * len(prompts))
        alone = engine.generate(prompts[3:4], max_tokens=5, policies=["fier-64"])
        both = engine.generate(prompts[:4] * 2, max_tokens=6, policies=[None] * 4 + ["full"] * 4)
        counters = engine.stats()["policies"]["fier-256"]
        engine.assert_idle()
    assert_parity(model, [*together, *alone], Read(Retrieve(64)))
    assert_parity(model, both, Speed())
    assert_identical(both[:4], both[4:])
    assert counters["retrieval_steps"] == counters["entries_scored"] == 0
    assert counters["dense_fallbacks"] == 4 * 5


def test_all_layers_read_everything(tiny: Callable[..., Path]) -> None:
    """`dense_layers` of the whole model: no step counts as one that retrieves, and all is read."""
    model = tiny(layers=3)
    name = named(Read(Retrieve(64, dense_layers=3)))
    with running(model, name) as engine:
        answers = engine.generate(prompts_of((94, 130)), max_tokens=6)
        counters = engine.stats()["policies"][str(parse_policy(name))]
        engine.assert_idle()
    assert_parity(model, answers, Speed())
    assert (counters["retrieval_steps"], counters["dense_fallbacks"]) == (0, 2 * 5)
    assert counters["entries_read"] == counters["entries_held_in_decode"] > 0
    assert counters["entries_scored"] == 0


def test_the_batch_decides(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `auto` one request reads everything where three of its length retrieve: 300 entries pay
    for retrieval, and 400 of one request. A number in `dense_below` is by length alone."""
    pays = Costs(whole=0, whole_entry=KI, fixed=300 - IN_ENGINE_US, scored=0, read=0)
    monkeypatch.setitem(COSTS, "torch", {(1, 1): pays})
    monkeypatch.setitem(CROSSOVERS, "torch", {(1, 1): 400})
    model = tiny()
    prompts = prompts_of((120, 121, 127, 410))
    by_length = "fier-64:dense_below=200"
    with running(model, "fier-64", max_num_batched_tokens=2304, max_num_seqs=5) as engine:
        told = engine.stats()["retrieval"]
        alone = engine.generate(prompts[:1], max_tokens=6)
        engine.generate(prompts[:3], max_tokens=6, policies=[by_length] * 3)
        whole = engine.stats()["policies"]
        together = engine.generate(prompts[:3], max_tokens=6)
        beside = engine.generate(prompts[2:], max_tokens=6)
        counters = engine.stats()["policies"]["fier-64"]
        engine.assert_idle()
    assert (told["auto"], told["dense_below"], told["dense_below_batch"]) == (400, 400, 65)
    assert [whole[name]["retrieval_steps"] for name in ("fier-64", by_length)] == [0, 0]
    assert [whole[name]["dense_fallbacks"] for name in ("fier-64", by_length)] == [5, 15]
    assert (counters["retrieval_steps"], counters["dense_fallbacks"]) == (5 * 5, 5)
    assert_parity(model, alone, Speed())
    assert_parity(model, [*together, *beside], Read(Retrieve(64)))


def test_few_rows_pay_by_themselves(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one launch does them: 100 entries of a request alone pay, and no batch does."""
    few, never = (
        Costs(0, KI, fixed - besides, 0, 0)
        for fixed, besides in ((100, ONE_LAUNCH_IN_ENGINE_US), (1 << 20, IN_ENGINE_US))
    )
    monkeypatch.setitem(COSTS, "torch", {(1, 1): never})
    monkeypatch.setitem(CROSSOVERS, "torch", {(1, 1): 400})
    monkeypatch.setitem(ONE_LAUNCH, (2, 256), few)
    monkeypatch.setattr(Scratch, "rows_in_one", lambda self, entries, captured: 1)
    model = tiny()
    prompts = prompts_of((120, 121))
    with running(model, "fier-64", max_num_batched_tokens=2304, max_num_seqs=5) as engine:
        told = engine.stats()["retrieval"]
        alone = engine.generate(prompts[:1], max_tokens=6)
        before = dict(engine.stats()["policies"]["fier-64"])
        together = engine.generate(prompts, max_tokens=6)
        after = engine.stats()["policies"]["fier-64"]
        engine.assert_idle()
    lengths = [told[f"dense_below{name}"] for name in ("", "_batch", "_one")]
    assert lengths == [400, 400, 101]
    assert (before["retrieval_steps"], before["dense_fallbacks"]) == (5, 0)
    assert (after["retrieval_steps"], after["dense_fallbacks"]) == (5, 10)
    assert_parity(model, alone, Read(Retrieve(64)))
    assert_parity(model, together, Speed())


def test_batch_invariant_servers_read_by_length(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same costs and lengths; vLLM was told that no answer may depend on the batch."""
    pays = Costs(whole=0, whole_entry=KI, fixed=300 - IN_ENGINE_US, scored=0, read=0)
    monkeypatch.setitem(COSTS, "torch", {(1, 1): pays})
    monkeypatch.setitem(CROSSOVERS, "torch", {(1, 1): 400})
    # For the worker alone: with the variable set, vLLM's attention on CPU refuses to start.
    monkeypatch.setattr(retrieval, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True))
    with running(tiny(), "fier-64", max_num_batched_tokens=2304, max_num_seqs=5) as engine:
        told = engine.stats()["retrieval"]
        engine.generate(prompts_of((120, 121, 127, 410)), max_tokens=6)
        counters = engine.stats()["policies"]["fier-64"]
        engine.assert_idle()
    assert (told["dense_below"], told["dense_below_batch"]) == (400, 400)
    assert (counters["retrieval_steps"], counters["dense_fallbacks"]) == (5, 3 * 5)


def test_token_by_token(tiny: Callable[..., Path]) -> None:
    """Chunks of one token look like decode steps, and read everything all the same."""
    model = tiny()
    prompts = prompts_of((70, 61, 66))
    names = ["fier-64", "full", "fier-64"]
    options = dict(long_prefill_token_threshold=1, max_num_batched_tokens=16)
    with running(model, "fier-64", **options) as engine:
        answers = engine.generate(prompts, max_tokens=6, policies=names)
        engine.assert_idle()
    assert_parity(model, answers[::2], Read(Retrieve(64)))
    assert_parity(model, answers[1:2], Speed())


def test_by_the_kernels(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What GPUs without CUDA ops run, under Triton's interpreter; `auto` never retrieves by it."""
    monkeypatch.setenv("KVX_RETRIEVAL_OPS", "triton")
    model = tiny(layers=3)
    with running(model, named(Read(Retrieve(64)))) as engine:
        told = engine.stats()["retrieval"]
        assert told["ops"] == "triton" and told["dense_below"] == 65 and told["auto"] >= 262144
        answers = engine.generate(prompts_of((94,)), max_tokens=4)
        before = engine.stats()["policies"]
        engine.generate(prompts_of((94,)), max_tokens=4, policies=["fier-64"])
        auto = engine.stats()["policies"]["fier-64"]
        engine.assert_idle()
    assert before[str(parse_policy(named(Read(Retrieve(64)))))]["retrieval_steps"] == 3
    assert auto["retrieval_steps"] == 0 and auto["dense_fallbacks"] == 3
    assert_parity(model, answers, Read(Retrieve(64)))
