"""What a model of transformers makes of a prompt with images, for the references to go on from.

The references run a decoder's layers by hand. Of a prompt with images they need to know three
things: what enters the lowest layer, where its tokens stand (M-RoPE counts an image's rows and
columns), and what is added to tokens of images above some layers (Qwen3-VL). All three are caught
in one forward pass of the model as transformers has it, with its own encoder.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoProcessor, PreTrainedModel


class Pictured(NamedTuple):
    """A prompt of N tokens, those of its images included.

    embedded: (N, hidden) float32. rows: (1 or 3, N) int64. added: (N, hidden) by layer, where
    anything is added to what leaves it.
    """

    embedded: Tensor
    rows: Tensor
    added: dict[int, Tensor]

    def rows_of(self, positions: Tensor) -> Tensor:
        """(1 or 3, n) where the tokens at positions (n,) int64 stand."""
        length = self.rows.shape[1]
        generated = self.rows.max() + 1 + positions - length
        return torch.where(
            positions < length, self.rows[:, positions.clamp(max=length - 1)], generated
        )

    def after(self, layer: int, hidden: Tensor, positions: Tensor) -> Tensor:
        """What goes on above `layer`, of what leaves it (n, hidden) at positions (n,)."""
        if layer not in self.added:
            return hidden
        length = len(self.embedded)
        more = self.added[layer][positions.clamp(max=length - 1)]
        return hidden + more * (positions < length)[:, None]


# The prompt that the references see, if it has images.
_seen: list[Pictured | None] = []


def seen() -> Pictured | None:
    """The prompt in force."""
    return _seen[-1] if _seen else None


@contextmanager
def seeing(pictured: Pictured | None) -> Iterator[None]:
    """Within, references take a prompt's tokens for those of `pictured`; None is a text's."""
    _seen.append(pictured)
    try:
        yield
    finally:
        _seen.pop()


@torch.no_grad()
def picture(
    model: PreTrainedModel, layers: Any, path: Path, prompt: list[int], images: Sequence[Any]
) -> Pictured:
    """What `model`, of `layers` and with its processor at `path`, makes of a prompt.

    prompt: as an engine has it, with a token for each part of an image that the encoder returns.
    """
    made = AutoProcessor.from_pretrained(path).image_processor(
        images=list(images), return_tensors="pt"
    )
    ids = torch.tensor([prompt])
    if "image_grid_thw" in made:
        made["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    decoder: Any = model.get_decoder()
    entered: list[Tensor] = []
    left: list[Tensor] = []
    rows: list[Tensor] = []

    def enters(_layer: Any, args: Any) -> None:
        entered.append(args[0][0])

    def leaves(_layer: Any, _args: Any, out: Any) -> None:
        left.append((out[0] if isinstance(out, tuple) else out)[0])

    def turns(_rotary: Any, args: Any, kwargs: dict[str, Any]) -> None:
        found = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        rows.append(found.reshape(-1, found.shape[-1]))

    hooks = [decoder.rotary_emb.register_forward_pre_hook(turns, with_kwargs=True)]
    for layer in layers:
        hooks += [layer.register_forward_pre_hook(enters), layer.register_forward_hook(leaves)]
    try:
        model(input_ids=ids, use_cache=False, **made)
    finally:
        for hook in hooks:
            hook.remove()
    between = enumerate(zip(left, entered[1:], strict=False))
    added = {i: above - below for i, (below, above) in between if not torch.equal(above, below)}
    return Pictured(entered[0], rows[0], added)
