"""The mapping of rows to adapters, against vLLM's own of the same rows."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.lora.layers import LoRAMapping
from vllm.lora.model_manager import DEFAULT_LANGUAGE_WRAPPER_KEY
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

from vllm_kvx.models.adapters import AdapterRows, StepAdapters
from vllm_kvx.models.passes import RequestRows

SLOTS, TOKENS, REQUESTS, VOCAB = 3, 64, 8, 100
# vLLM's numbers of the adapters at each place; the middle one is free.
AT_PLACES = [7, None, 4]


def manager(on_gpu: bool, specialize: bool = False) -> Any:
    """What is read of vLLM's LoRA manager, with its buffers for GPUs or for CPUs."""
    config = SimpleNamespace(max_loras=SLOTS, specialize_active_lora=specialize)
    kind = PunicaWrapperGPU if on_gpu else PunicaWrapperCPU
    return SimpleNamespace(
        supports_mm=False,
        lora_slots=SLOTS,
        lora_index_to_id=AT_PLACES,
        vocab_size=VOCAB,
        punica_wrapper_mapping={
            DEFAULT_LANGUAGE_WRAPPER_KEY: kind(TOKENS, REQUESTS, "cpu", lora_config=config)
        },
    )


def by_vllm(of: Any, numbers: list[int], requests: list[int]) -> Any:
    """vLLM's buffers for rows of adapters with these numbers; `requests`: of those that sample."""
    wrapper = of.punica_wrapper_mapping[DEFAULT_LANGUAGE_WRAPPER_KEY]
    mapping = LoRAMapping(tuple(numbers), tuple(requests), is_prefill=True)
    wrapper.update_metadata(mapping, of.lora_index_to_id, SLOTS + 1, VOCAB)
    return wrapper


def read(wrapper: Any, count: int) -> dict[str, Any]:
    """All that LoRA layers read of `count` rows."""
    found: dict[str, Any] = {
        "rows": wrapper.token_lora_indices,
        "embeddings": wrapper._embeddings_indices[:count],
        "sampled": wrapper.sampler_indices,
        "lengths": wrapper.indices_len,
    }
    if isinstance(wrapper, PunicaWrapperCPU):
        # vLLM's operators take nothing else where there is no adapter.
        return found | {"none": wrapper.no_lora, "runs": wrapper.prefill_metadata}
    *metas, no_lora, active = wrapper.token_mapping_meta.meta_args(count, True)
    if no_lora:
        return found | {"none": True}
    prompts = wrapper.prompt_mapping_meta.meta_args(len(wrapper.sampler_indices), True)
    return found | {"none": False, "active": active, "metas": metas, "prompts": prompts}


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        ours, theirs = list(ours.values()), list(theirs.values())
    if isinstance(ours, Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(ours, list | tuple):
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other)
    else:
        assert ours == theirs


@pytest.mark.parametrize(("on_gpu", "specialize"), [(False, False), (True, False), (True, True)])
def test_rows_are_mapped_as_by_vllm(on_gpu: bool, specialize: bool) -> None:
    """Passes over some rows of random steps, and the whole step again after them."""
    random = np.random.default_rng(0)
    for _ in range(40):
        ours, theirs = manager(on_gpu, specialize), manager(on_gpu, specialize)
        requests = int(random.integers(1, REQUESTS + 1))
        counts = random.integers(1, TOKENS // REQUESTS + 1, requests)
        numbers = random.choice([0, 4, 7], requests, p=random.dirichlet((1, 1, 1)))
        whole = np.repeat(numbers, counts).tolist()
        wrapper = by_vllm(ours, whole, numbers.tolist())
        rows = AdapterRows.of(SimpleNamespace(lora_manager=ours))
        assert rows is not None
        step = StepAdapters(rows, rows.places(numbers), counts)
        for _ in range(3):
            some = np.flatnonzero(random.random(requests) < 0.7)
            of_each = random.integers(0, TOKENS // REQUESTS + 1, len(some))
            if not of_each.sum():
                continue
            step.select(RequestRows(some, of_each))
            here = np.repeat(numbers[some], of_each).tolist()
            other = by_vllm(theirs, here, numbers.tolist())
            assert_same(read(wrapper, len(here)), read(other, len(here)))
        step.select(None)
        other = by_vllm(theirs, whole, numbers.tolist())
        assert_same(read(wrapper, len(whole)), read(other, len(whole)))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_rows_that_try_a_range(on_gpu: bool) -> None:
    """Before anything is mapped, and amid a step, whose rows are mapped again afterwards."""
    ours, theirs = manager(on_gpu), manager(on_gpu)
    rows = AdapterRows(ours)
    with rows.none(8):
        (wrapper,) = ours.punica_wrapper_mapping.values()
        assert wrapper.token_lora_indices.tolist() == [-1] * 8
    whole = [7] * 5 + [0] * 20 + [4] * 6
    by_vllm(ours, whole, [7, 0, 4])
    with rows.first(8):
        assert_same(read(wrapper, 8), read(by_vllm(theirs, whole[:8], [7, 0, 4]), 8))
    assert_same(read(wrapper, 31), read(by_vllm(theirs, whole, [7, 0, 4]), 31))
    with rows.none(8):
        assert read(wrapper, 8)["none"]
    assert_same(read(wrapper, 31), read(by_vllm(theirs, whole, [7, 0, 4]), 31))


def test_a_model_without_adapters() -> None:
    assert AdapterRows.of(torch.nn.Module()) is None
