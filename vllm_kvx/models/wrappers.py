"""Models that wrap a language model, such as those that also read images, and its ranges of layers.

Ranges run the decoder past the wrapper. So on a text the wrapper must do nothing of its own.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vllm_kvx.models.layer_ranges import LayerRanges, NoRanges

# Tokens of the text that is tried.
_TRIED = 8
# A model's forward pass on ids, positions, tensors of an earlier stage, and embeddings.
Forward = Callable[[Tensor | None, Tensor, Any, Tensor | None], Any]


class _Listener(nn.Module):
    """Stands in for a decoder: keeps what it is called with, and returns `out`."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.out = out
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.append((args, kwargs))
        return self.out


@torch.no_grad()
def check_wrapper(model: nn.Module, forward: Forward, ranges: LayerRanges) -> None:
    """Runs `forward` of `model` on a text, and looks at what it asks of its decoder.

    Raises:
        NoRanges: the decoder gets something else than token ids and positions, or its output is
            changed.
    """
    device = next(model.parameters()).device
    ids = torch.zeros(_TRIED, dtype=torch.int32, device=device)
    positions = ranges.positions_of_decoder(torch.arange(_TRIED, device=device))
    listener = _Listener(torch.zeros(_TRIED, ranges.hidden_size, device=device))
    owner, name = _place_of(ranges.decoder, model)
    owner._modules[name] = listener
    try:
        out = forward(ids, positions, None, None)
    except Exception as error:
        raise NoRanges(f"{type(model).__name__} does not run without its decoder: {error!r}") from (
            error
        )
    finally:
        owner._modules[name] = ranges.decoder
    named = [_by_name(ranges.decoder, call) for call in listener.calls]
    expected = {"input_ids": ids, "positions": positions}
    if out is not listener.out or len(named) != 1 or not _are_same(named[0], expected):
        raise NoRanges(f"{type(model).__name__} does more to a text than its decoder does")


def _place_of(decoder: nn.Module, model: nn.Module) -> tuple[nn.Module, str]:
    """The module that has the decoder, and the name that it has there."""
    for module in model.modules():
        for name, child in module.named_children():
            if child is decoder:
                return module, name
    raise NoRanges(f"{type(model).__name__} is its own decoder")


def _by_name(decoder: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
    """What a call gives to the decoder, but for arguments that are None."""
    signature = inspect.signature(inspect.unwrap(type(decoder).forward))
    given = signature.bind(decoder, *call[0], **call[1]).arguments
    return {
        name: value for name, value in given.items() if value is not None and value is not decoder
    }


def _are_same(some: dict[str, Any], others: dict[str, Any]) -> bool:
    """Whether both have the very same tensors."""
    return some.keys() == others.keys() and all(some[name] is others[name] for name in others)
