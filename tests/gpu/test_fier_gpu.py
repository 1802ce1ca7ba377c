"""FIER and Quest compiled, under CUDA graphs, in fp8, over two GPUs. Skipped without a GPU."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import fastkv, fier
from support.engine import Answer, running
from support.expected import Read, Speed
from support.gpu import COMPILED, EXACT
from support.inside import count_retrieval_graphs, one_launch_ran, tickets
from support.models import LOOKUP
from support.parity import assert_parity
from support.prompts import EDGES, lookups, prompts_of

from vllm_kvx.ops.retrieval import cuda
from vllm_kvx.ops.retrieval.one_launch import CAPABILITY

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PAGES = {"block_size": 32}


@pytest.mark.parametrize(
    ("policy", "retrieve"),
    [
        ("fier-64:dense_below=0", fier.Retrieve(64)),
        (
            "fier-96:reduction=softmax,dense_below=0,reuse_layers=2",
            fier.Retrieve(96, reduction="softmax", reuse_layers=2),
        ),
        ("quest-64:dense_below=0", fier.Retrieve(64, group=16, pages=True)),
        ("fier-64:dense_below=0,dense_layers=0", fier.Retrieve(64, dense_layers=0)),
    ],
)
def test_parity_compiled(
    tiny: Callable[..., Path],
    policy: str,
    retrieve: fier.Retrieve,
) -> None:
    model = tiny(head_dim=64, hidden=128)
    prompts = prompts_of((*EDGES, 300, 700))
    names = ["full" if i % 4 == 3 else None for i in range(len(prompts))]
    with running(
        model, policy, max_num_seqs=32, enable_prefix_caching=True, **(EXACT | PAGES)
    ) as engine:
        counts = count_retrieval_graphs(engine)
        answers = engine.generate(prompts, max_tokens=12, policies=names)
        mixed, before = dict(counts), dict(counts)
        alone = [engine.generate([p], max_tokens=6)[0] for p in prompts_of((300, 200), seed=4)]
        decode = {name: n - before.get(name, 0) for name, n in counts.items()}
        again = engine.generate([[*a.prompt, *a.tokens, 7] for a in answers[-4:]], max_tokens=4)
        engine.assert_idle()
    print(json.dumps({policy: {"mixed": mixed, "alone": decode}}))
    own = [a for a, name in zip(answers, names, strict=True) if name is None]
    assert_parity(model, [*own, *alone, *again], Read(retrieve), least=0.6)
    full = [a for a, name in zip(answers, names, strict=True) if name]
    assert_parity(model, full, Speed())
    assert any(a.cached for a in again)
    # Every decode step is a FULL graph; alone it runs no stock attention above those that
    # read everything. The prompts take four and three chunks.
    assert decode["all"] == 10 and decode["steps"] == 17 and mixed["mixed"] > 0, (mixed, decode)


def test_budget_covers_the_context(tiny: Callable[..., Path]) -> None:
    model = tiny(head_dim=64, hidden=128)
    with running(model, "fier-1024:dense_below=0", max_num_seqs=32, **(EXACT | PAGES)) as engine:
        counts = count_retrieval_graphs(engine)
        answers = engine.generate(prompts_of((*EDGES, 500, 1000)), max_tokens=8)
        engine.assert_idle()
    assert_parity(model, answers, Speed())
    assert set(counts) == {"steps", "dense"}, counts


@pytest.mark.parametrize(
    "policy", [f"{p}+fier-64:dense_below=0" for p in ("speed-4", "snapkv:kv_rate=0.5,kv_floor=0")]
)
def test_composed(tiny: Callable[..., Path], policy: str) -> None:
    model = tiny(head_dim=64, hidden=128)
    keep = fastkv.Keep(cutoff=4) if "speed" in policy else fastkv.Keep(kv_rate=0.5)
    with running(model, policy, max_num_seqs=32, **(EXACT | PAGES)) as engine:
        counts = count_retrieval_graphs(engine)
        answers = engine.generate(prompts_of((33, 129, 200, 300, 401, 700)), max_tokens=8)
        engine.assert_idle()
    print(json.dumps({policy: counts}))
    assert_parity(model, answers, Read(fier.Retrieve(64), keep), least=0.6)


def test_composed_on_a_server_of_another_policy(tiny: Callable[..., Path]) -> None:
    """A request of `speed-4+fier-64` alone runs no stock attention in the layers that retrieve,
    though the server's own policy retrieves in all of them."""
    model = tiny(head_dim=64, hidden=128)
    own, other = "fier-64:dense_below=0", "speed-4+fier-64:dense_below=0"
    options = EXACT | PAGES | {"config": {"kv_layout": [other]}}
    with running(model, own, max_num_seqs=32, **options) as engine:
        counts = count_retrieval_graphs(engine)
        prompts = prompts_of((401, 700))
        composed = [engine.generate([p], max_tokens=8, policies=[other])[0] for p in prompts]
        assert counts["all+dense"] == 2 * 7 and "mixed+mixed" not in counts, counts
        (alone,) = engine.generate(prompts[:1], max_tokens=8)
        assert counts["all+all"] == 7, counts
        # The longer prompt takes three steps more, in which the other one decodes.
        together = engine.generate(prompts, max_tokens=16, policies=[other, None])
        assert counts.get("mixed+mixed", 0) > 0, counts
        engine.assert_idle()
    keep = fastkv.Keep(cutoff=4)
    assert_parity(model, [*composed, together[0]], Read(fier.Retrieve(64), keep), least=0.6)
    assert_parity(model, [alone, together[1]], Read(fier.Retrieve(64)), least=0.6)


def test_preempted_equals_uninterrupted(tiny: Callable[..., Path]) -> None:
    model = tiny(head_dim=64, hidden=128)
    prompts = prompts_of((180, 150, 200, 170, 90, 129, 160, 31, 330, 300))
    options = EXACT | PAGES | {"enforce_eager": True}
    with running(
        model,
        "fier-64:dense_below=0",
        num_gpu_blocks_override=46,
        max_model_len=576,
        max_num_seqs=16,
        **options,
    ) as engine:
        answers = engine.generate(prompts, max_tokens=120)
        preemptions = engine.preemptions()
        engine.assert_idle()
    assert preemptions > 0, "the pool was meant to be too small"
    assert_parity(model, answers, Read(fier.Retrieve(64)), least=0.1)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_checkpoint_answers(kv_cache_dtype: str) -> None:
    prompts, expected, decode = lookups(100, values=3)
    fiers = ["fier-256", "fier-128", "fier-64", "speed-5+fier-128"]
    names = [*(f"{name}:dense_below=0" for name in fiers), "full"]
    score, reads = {}, {}
    with running(
        LOOKUP,
        names[0],
        dtype="bfloat16",
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=64,
        config={"kv_layout": names},
        **(COMPILED | PAGES | {"max_num_batched_tokens": 2048}),
    ) as engine:
        for name in names:
            answers = engine.generate(prompts, max_tokens=4, policies=[name] * len(prompts))
            right = [decode(a.tokens) == e for a, e in zip(answers, expected, strict=True)]
            score[name] = sum(right) / len(right)
        stats = engine.stats()["policies"]
        reads = {
            n: stats[n]["entries_read"] / stats[n]["entries_held_in_decode"] for n in names[:4]
        }
        engine.assert_idle()
    print(json.dumps({"kv_cache_dtype": kv_cache_dtype, "accuracy": score, "read": reads}))
    assert min(score["full"], score[names[0]]) >= 0.9, score


def test_one_launch_answers() -> None:
    """Up to four requests decode in one launch a layer, in CUDA graphs; steps whose recall is
    measured run apart, and choose as well."""
    prompts, expected, decode = lookups(24, values=3)
    config, few = {"kv_recall_every": 5}, dict(max_num_seqs=4, max_num_batched_tokens=2048)
    with running(
        LOOKUP,
        "fier-256:dense_below=0",
        dtype="bfloat16",
        config=config,
        **(COMPILED | PAGES | few),
    ) as engine:
        in_one = not cuda.why_not() and torch.cuda.get_device_capability() == CAPABILITY
        counts = count_retrieval_graphs(engine)
        one_launch_ran(engine)
        answers = engine.generate(prompts, max_tokens=4)
        assert one_launch_ran(engine) == in_one and not tickets(engine).any()
        engine.generate(prompts[:1], max_tokens=8)
        assert one_launch_ran(engine) == in_one and counts["all"] > 0, counts
        recall = engine.stats()["retrieval"]["recall"]
        engine.assert_idle()
    right = [decode(a.tokens) == e for a, e in zip(answers, expected, strict=True)]
    print(json.dumps({"one_launch": in_one, "right": sum(right), "recall": recall}))
    assert sum(right) >= 0.9 * len(right) and 0.5 < recall <= 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tp2_decides_what_tp1_decides() -> None:
    prompts, _, _ = lookups(24, values=3)
    answers: dict[int, list[Answer]] = {}
    for size in (1, 2):
        with running(
            LOOKUP, "fier-128:dense_below=0", tensor_parallel_size=size, **(EXACT | PAGES)
        ) as engine:
            answers[size] = engine.generate(prompts, max_tokens=5)
            engine.assert_idle()
    for one, two in zip(answers[1], answers[2], strict=True):
        assert one.tokens == two.tokens
        assert (one.logprobs - two.logprobs).abs().max() < 1e-4
