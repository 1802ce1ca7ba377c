"""vLLM warms up with requests of its own, which are nobody's traffic."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from reference.zoo import build
from support import inside
from support.engine import running
from support.expected import Speed
from support.parity import ask, assert_parity
from support.prompts import prompt_of

from vllm_kvx.policy.layout import Layout
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.worker import warm_up as module
from vllm_kvx.worker.warm_up import warm_up


@pytest.mark.usefixtures("dense_ops")
def test_warm_up_is_not_counted(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    stock, counted = CPUWorker.compile_or_warm_up_model, []
    ran: list[KVPolicy] = []

    @wraps(stock)
    def as_on_a_gpu(worker: Any) -> Any:
        times = stock(worker)
        warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)
        settings = worker.model_runner.model_state.settings
        ran.extend(
            warm_up(worker.model_runner, worker.execute_model, worker.sample_tokens, settings)
        )
        counted.append(worker.kv_policy_stats()["policies"])
        return times

    monkeypatch.setattr(CPUWorker, "compile_or_warm_up_model", as_on_a_gpu)
    policy, ahead = "fier-64:dense_below=0", "snapkv:kv_floor=0,lookahead=4"
    with running(tiny(), "snapkv:kv_floor=0", config={"kv_layout": [policy, ahead]}) as engine:
        (during,) = counted
        assert set(during) == {"snapkv:kv_floor=0", policy, ahead, "full"}
        assert (
            during["snapkv:kv_floor=0"]["requests"] > 0
            and during["snapkv:kv_floor=0"]["prompt_tokens"] > 0
        )
        # Each has run a prompt long enough to give something up, before the first request.
        assert [str(each) for each in ran] == ["snapkv:kv_floor=0", policy, ahead]
        assert during[policy]["requests"] > 0 and any(
            during["snapkv:kv_floor=0"]["entries_retained_by_layer"]
        )
        worker = inside.worker(engine)
        stats = worker.kv_policy_stats()
        for totals in stats["policies"].values():
            lists = ("online_pivots", "entries_retained_by_layer")
            assert not any(totals[key] for key in totals if key not in lists)
            assert not any(totals["entries_retained_by_layer"]) and not totals["online_pivots"]
        for counter in ("kv_bytes_moved", "seconds_in_retention", "seconds_in_detector"):
            assert stats[counter] == 0
        assert stats["retrieval"]["seconds_in_sidecar_writes"] == 0
        assert stats["retrieval"]["recall_samples"] == 0

        engine.generate([prompt_of(150)], policies=[policy])
        counted_now = {
            name: (totals["requests"], totals["prompt_tokens"])
            for name, totals in worker.kv_policy_stats()["policies"].items()
        }
        others = dict.fromkeys(("snapkv:kv_floor=0", ahead, "full"), (0, 0))
        assert counted_now == {policy: (1, 150), **others}


@pytest.mark.usefixtures("dense_ops")
def test_experts_run_on_every_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd numbers of rows, too, where rows are left behind; and nothing is changed by it."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    stock, seen = CPUWorker.compile_or_warm_up_model, []

    @wraps(stock)
    def as_on_a_gpu(worker: Any) -> Any:
        times = stock(worker)
        runner = worker.model_runner
        forward = type(runner.model).forward

        def watched(model: Any, input_ids: Any, *args: Any, **options: Any) -> Any:
            seen.append(len(input_ids))
            return forward(model, input_ids, *args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(type(runner.model), "forward", watched)
            settings = runner.model_state.settings
            warm_up(runner, worker.execute_model, worker.sample_tokens, settings)
        return times

    monkeypatch.setattr(CPUWorker, "compile_or_warm_up_model", as_on_a_gpu)
    model = build(tmp_path / "model", "qwen3_moe")
    with running(model, "speed-4", max_model_len=512, max_num_batched_tokens=96) as engine:
        assert {1, 3, 4, 5, 9, 17, 18, 33, 65, 66} <= set(seen) and max(seen) == 96
        answers = ask(engine, [prompt_of(150)], [Speed(4)], max_tokens=4)
        engine.assert_idle()
    assert_parity(model, answers, Speed(4))


def test_ranks_of_experts_agree_on_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one has no room for a prompt, none runs it: they run in lockstep."""
    seen: list[int] = []

    def run(runner: Any, *_args: Any, **_options: Any) -> bool:
        seen.append(runner.kv_cache_config.num_blocks)
        return False

    def reduce(blocks: Any, **_options: Any) -> None:
        blocks.clamp_(max=7)  # What another rank has.

    monkeypatch.setattr(module, "run_mixed_prefill_decode_warmup", run)
    monkeypatch.setattr(module, "get_dp_group", lambda: SimpleNamespace(cpu_group=None))
    monkeypatch.setattr(module.distributed, "all_reduce", reduce)
    settings: Any = SimpleNamespace(policies=[parse_policy("snapkv")], layout=Layout(()))
    for ranks, is_moe, expected in ((2, True, 7), (2, False, 20), (1, True, 20)):
        runner: Any = SimpleNamespace(
            kv_cache_config=SimpleNamespace(num_blocks=20),
            parallel_config=SimpleNamespace(data_parallel_size=ranks),
            model_config=SimpleNamespace(is_moe=is_moe, get_vocab_size=lambda: 512),
            model_state=SimpleNamespace(checks_blocks=True),
            max_num_tokens=96,
            max_model_len=1024,
        )
        seen.clear()
        assert warm_up(runner, lambda _: None, lambda _: None, settings) == []
        assert set(seen) == {expected} and runner.kv_cache_config.num_blocks == 20
