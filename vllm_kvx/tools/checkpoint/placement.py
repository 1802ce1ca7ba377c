"""Where a decoder's layers run: on one GPU where they fit, else on as few as hold them.

A server with --tensor-parallel-size splits every layer over its GPUs. A tool runs layer by layer,
so it gives each GPU some layers whole, and a prompt's rows go from one to the next.
"""

from collections.abc import Sequence
from typing import Any

import torch

from vllm_kvx.errors import ToolError

# The share of a GPU's free memory that weights may take; the rest is for a prompt's rows.
WEIGHTS_SHARE = 0.85


def shares(layers: Sequence[int], rest: int, free: Sequence[int]) -> list[int] | None:
    """The GPU of every layer, as few as hold them and in their order; None if all are too small.

    Args:
        layers: bytes of each layer's weights. rest: bytes of what the first GPU holds besides.
        free: bytes that each GPU has for weights.
    """
    places: list[int] = []
    gpu, left = 0, free[0] - rest
    for size in layers:
        while size > left or left < 0:
            gpu += 1
            if gpu == len(free):
                return None
            left = free[gpu]
        places.append(gpu)
        left -= size
    return places if rest <= free[0] else None


def place(model: Any, target: torch.device, spread: bool) -> list[torch.device]:
    """Move a model, as `load_weights` gives it, to `target`; the device of each layer.

    spread: whether further GPUs may be used, where one is too small.

    Raises:
        ToolError: the GPUs are too small.
    """
    layers = model.model.layers
    if target.type != "cuda":
        model.to(target)
        return [target] * len(layers)
    gpus = [target]
    if spread:
        gpus = [torch.device("cuda", gpu) for gpu in range(torch.cuda.device_count())]
    free = [int(torch.cuda.mem_get_info(gpu)[0]) for gpu in gpus]
    sizes = [_bytes(layer) for layer in layers]
    total = _bytes(model)
    places = shares(sizes, total - sum(sizes), [int(WEIGHTS_SHARE * each) for each in free])
    try:
        if places is None and len(gpus) > 1:
            raise ToolError(_too_small(total, free))
        return move(model, [gpus[place] for place in places or [0] * len(layers)])
    except torch.cuda.OutOfMemoryError as error:
        raise ToolError(_too_small(total, free)) from error


def move(model: Any, devices: Sequence[torch.device]) -> list[torch.device]:
    """Move each layer to its device, and all else to the first layer's; returns the devices."""
    layers = model.model.layers
    for layer, device in zip(layers, devices, strict=True):
        layer.to(device)
    for module in (model.model.embed_tokens, model.model.rotary_emb, model.model.norm):
        module.to(devices[0])
    model.lm_head.to(devices[0])
    return list(devices)


def _bytes(module: torch.nn.Module) -> int:
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _too_small(total: int, free: Sequence[int]) -> str:
    have = " + ".join(f"{each / 2**30:.1f}" for each in free)
    return (
        f"the weights take {total / 2**30:.1f} GiB, and GPU memory is too small for them ({have} "
        "GiB free): use --device cpu, which is slow, or a machine with more GPU memory"
    )
