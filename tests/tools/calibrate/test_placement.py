"""Where tools put a model that one GPU cannot hold."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_kvx.errors import ToolError
from vllm_kvx.policy.methods.structkv import StructKV
from vllm_kvx.tools.checkpoint import placement
from vllm_kvx.tools.checkpoint.answers import Choice, Chooser, choices_of
from vllm_kvx.tools.checkpoint.dense_decoder import Cache, DenseDecoder
from vllm_kvx.tools.checkpoint.placement import move, place, shares

LAYERS, WINDOW = 4, 8


def tiny() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64},
        )
    )


@pytest.mark.parametrize(
    ("layers", "rest", "free", "places"),
    [
        ([3, 3, 3, 3], 2, [14], [0, 0, 0, 0]),
        ([3, 3, 3, 3], 2, [14, 14], [0, 0, 0, 0]),  # No more GPUs than it needs.
        ([3, 3, 3, 3], 2, [13, 14], [0, 0, 0, 1]),
        ([3, 3, 3, 3], 2, [5, 2, 9], [0, 2, 2, 2]),  # The second one is somebody else's.
        ([3, 3, 3, 3], 2, [2, 12], [1, 1, 1, 1]),
        ([3, 3, 3, 3], 2, [13], None),
        ([3, 3, 3, 3], 2, [5, 5, 2], None),
        ([3, 3, 3, 3], 2, [1, 20], None),
    ],
)
def test_shares(layers: list[int], rest: int, free: list[int], places: list[int] | None) -> None:
    assert shares(layers, rest, free) == places


class Gpus(TorchFunctionMode):
    """Says of every tensor on which of several devices it would be, and lets no operator mix two.

    All are on the CPU: devices are told apart by their index, which torch drops.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return torch.device("cpu", getattr(args[0], "gpu", 0))
        out = func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]
        where = {getattr(tensor, "gpu", 0) for tensor in tensors}
        if given:
            where = {given[0].index or 0}
        assert len(where) <= 1, f"{func.__name__} takes tensors of several devices"
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and where:
                # `to` may return the tensor itself.
                moved = leaf.view_as(leaf) if any(leaf is each for each in tensors) else leaf
                if moved is not leaf and func is torch.Tensor.to:
                    out = leaf = moved
                leaf.gpu = next(iter(where))  # type: ignore[attr-defined]
        return out


def test_layers_on_two_gpus_meet_no_tensor_of_the_other() -> None:
    model, prompt = tiny(), list(range(40))
    devices = [torch.device("cpu", gpu) for gpu in (0, 0, 1, 1)]
    for layer in model.model.layers[2:]:
        for tensor in layer.parameters():
            tensor.gpu = 1

    def outcome(decoder: DenseDecoder) -> list[torch.Tensor]:
        cache, chooser = Cache(), Chooser(StructKV(), len(prompt), choices_of([0.2]))
        ran, found = [], []
        for rows, attention in decoder.layers(decoder.embed(prompt), window=WINDOW, cache=cache):
            assert attention is not None
            chosen = chooser(attention)[Choice(0.2, "sum")]  # by sums over layers
            ran.append(rows)
            found.append(attention)
        logits, masses = decoder.extend([3], len(prompt), cache)
        found += [
            decoder.last_state(rows),
            decoder.logits(rows.hidden),
            logits,
            torch.stack(masses),
        ]
        # Selected rows go on, whatever device says which.
        for layer in range(LAYERS - 1):
            some = ran[layer].select(chosen)
            for rows, _ in decoder.layers(some, layer + 1):
                assert len(rows) == len(chosen)
            found.append(decoder.logits(rows.hidden[-1:]))
        return found

    with torch.no_grad(), Gpus():
        spread = outcome(DenseDecoder(model, devices))
        with pytest.raises(AssertionError, match="takes tensors of several devices"):
            outcome(DenseDecoder(model))
    assert all(getattr(tensor, "gpu", 0) == 0 for tensor in spread)
    for mine, expected in zip(spread, outcome(DenseDecoder(model)), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)


def test_one_device_is_as_before() -> None:
    model, cpu = tiny(), torch.device("cpu")
    devices = place(model, cpu, spread=True)
    assert devices == [cpu] * LAYERS == move(model, devices)
    rows, _ = list(DenseDecoder(model, devices).layers(DenseDecoder(model).embed(range(20))))[-1]
    with torch.no_grad():
        expected = model.model(torch.arange(20)[None]).last_hidden_state[0, -1]
    torch.testing.assert_close(DenseDecoder(model, devices).last_state(rows), expected)


@pytest.mark.parametrize(("free", "spread"), [([100, 100], True), ([100], False)])
def test_too_small(monkeypatch: pytest.MonkeyPatch, free: list[int], spread: bool) -> None:
    def no_room(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free[gpu.index or 0], 1 << 40))
    monkeypatch.setattr(placement, "move", no_room)
    with pytest.raises(ToolError, match=r"weights take 0\.0 GiB, .* free\): use --device cpu"):
        place(tiny(), torch.device("cuda"), spread)
