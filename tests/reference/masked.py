"""Any decoder of transformers under other attention, with nothing known of its architecture.

transformers lets a model's attention be replaced by a function of its queries, keys and values,
after rotary embeddings and after norms of heads. With that and the model's own forward, a decoder
runs under any visibility (`forward`), a layer at a time on any rows (`embed`, `run_layer`,
`log_softmax`), or all layers on one row (`run_row`). Embedding multipliers, learned positions,
experts, norms after sublayers, layers without rotary embeddings, residual and logits multipliers
are all the model's own.

What it asks of a model: a `ModuleList` of as many layers as the config has, in its decoder, and
attention that goes through transformers' `AttentionInterface` once a layer. Soft caps and sinks are
applied by `attention`, and refused where a function attends without it. Windows are refused. `run`
hands all three on to its caller instead, and takes a model in which some layers have no attention;
`hybrid.py` has the policies on such models.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from . import pictures

NAME = "vllm_kvx_reference"
# Layer index, query (H, n, D), key and value (G, t, D) and the scale of logits -> (H, n, D). There
# are t > n keys only if the call has a transformers cache.
Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
# Layer index -> bool (n, t), or (H, n, t) for each query head: what rows see. It is asked when the
# layer attends, after all lower layers have.
Sees = Callable[[int], Tensor]


@dataclass(frozen=True)
class Call:
    """What a model's attention is called with, in one layer."""

    module: Any  # of transformers
    layer: int
    query: Tensor  # (H, n, D), rotated
    key: Tensor  # (G, t, D), rotated
    value: Tensor  # (G, t, D)
    scale: float  # of products
    window: int | None  # a row sees so many of the last tokens, itself included
    softcap: float | None  # of scaled products
    sinks: Tensor | None  # (H,) a logit of no token


@dataclass(frozen=True)
class Attended:
    """What a layer attended with, float32."""

    query: Tensor  # (H, n, D), rotated
    key: Tensor  # (G, t, D), rotated
    value: Tensor  # (G, t, D)
    probs: Tensor  # (H, n, t)


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the language model, which may be a part of `model`."""
    return model.config.get_text_config()


def layers_of(model: PreTrainedModel) -> Any:
    """The decoder's layers, from the lowest. Raises ValueError where they cannot be told."""
    count = text_config(model).num_hidden_layers
    decoder: Any = model.get_decoder()
    lists = [
        child
        for child in decoder.children()
        if isinstance(child, torch.nn.ModuleList) and len(child) == count
    ]
    if len(lists) != 1:
        raise ValueError(f"{type(model).__name__} has {len(lists)} lists of {count} modules")
    return lists[0]


def output_weight(layer: Any) -> Tensor:
    """(hidden, H * D): the weight of a layer's projection of what its heads read."""
    return output_weight_of(
        next(child for child in layer.children() if hasattr(child, "layer_idx"))
    )


def output_weight_of(attention: Any) -> Tensor:
    """The same of a layer's attention. Raises ValueError where its projection is unknown."""
    for name in ("o_proj", "c_proj", "dense", "out_proj"):
        if hasattr(attention, name):
            linear = getattr(attention, name)
            return linear.weight.T if isinstance(linear, Conv1D) else linear.weight
    raise ValueError(f"{type(attention).__name__} has no output projection of a known name")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    seen: Tensor,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What heads read (H, n, D) and by which weights (H, n, t).

    query (H, n, D), key and value (G, t, D), seen bool (n, t) or (H, n, t), sinks (H,). With sinks
    a row's weights add up to less than 1. Beside those given are those of the layer that runs.
    """
    if _unapplied:
        call = _unapplied.pop()
        softcap, sinks = call.softcap, call.sinks
    shared = query.shape[0] // key.shape[0]
    logits = query @ key.repeat_interleave(shared, 0).transpose(1, 2) * scale
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(~seen, float("-inf"))
    if sinks is None:
        probs = logits.softmax(dim=-1)
    else:
        sink = sinks[:, None, None].expand(-1, logits.shape[1], 1)
        probs = torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1]
    return probs @ value.repeat_interleave(shared, 0), probs


def causal(rows: int, total: int) -> Tensor:
    """(rows, total) bool: the last `rows` of `total` tokens see all up to themselves."""
    return torch.ones(rows, total, dtype=torch.bool).tril(total - rows)


def forward(
    model: PreTrainedModel,
    tokens: list[int],
    sees: Sees,
    *,
    start: int = 0,
    last: int = 0,
    cache: Cache | None = None,
    caught: list[Attended] | None = None,
) -> Tensor:
    """(last, V) float32 log-softmax of the last rows, all if 0, in one pass over all layers.

    Of texts alone: images are seen by the functions below.

    tokens: those at positions `start` and above; with a cache, it holds what is below.
    caught: gets an entry a layer, if given. Gradients flow where the caller lets them.
    """

    assert pictures.seen() is None

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        out, probs = attention(query, key, value, scale, sees(layer))
        if caught is not None:
            caught.append(Attended(query, key, value, probs))
        return out

    positions = torch.arange(start, start + len(tokens))
    with _attending(model, attend):
        logits = _call(model, torch.tensor(tokens), positions, cache, logits_to_keep=last)
    return logits.log_softmax(dim=-1)


def run(
    model: PreTrainedModel, tokens: list[int], attend: Callable[[Call], Tensor], *, last: int = 0
) -> Tensor:
    """(last, V) float32 log-softmax of the last rows, all if 0, in one pass over all layers.

    attend: what heads read (H, n, D), asked of every layer that has attention, from the lowest.
    """
    ids: Tensor | None = torch.tensor(tokens)
    options: dict[str, Any] = {"logits_to_keep": last}
    if (pictured := pictures.seen()) is not None:
        assert not pictured.added, "what is added above layers is lost here"
        ids, options["inputs_embeds"] = None, embed(model, tokens)[None]
    with _attending(model, attend, by_call=True):
        logits = _call(model, ids, torch.arange(len(tokens)), None, **options)
    return logits.log_softmax(dim=-1)


def embed(model: PreTrainedModel, tokens: list[int], start: int = 0) -> Tensor:
    """(n, hidden) float32: what enters the lowest layer for tokens at `start` and above."""
    pictured = pictures.seen()
    if pictured is not None and start < len(pictured.embedded):
        known = pictured.embedded[start : start + len(tokens)]
        generated = tokens[len(known) :]
        return (
            torch.cat([known, embed(model, generated, start + len(known))]) if generated else known
        )

    def take(hidden: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        raise _Taken(hidden[0])

    positions = torch.arange(start, start + len(tokens))
    with _replaced(layers_of(model)[:1], take):
        return _taken(model, torch.tensor(tokens), positions)


def run_layer(
    model: PreTrainedModel, layer: Any, hidden: Tensor, positions: Tensor, attend: Attend
) -> Tensor:
    """(n, hidden) after `layer`, one of `layers_of(model)`.

    hidden (n, hidden) float32 are rows of tokens at positions (n,) int64, any ascending ones.
    `attend` gets the keys and values of these rows alone: what else they see is its own matter.
    """
    layers = layers_of(model)
    index = [other is layer for other in layers].index(True)
    stock = layer.forward

    def run(_embedded: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        after = stock(hidden[None], *args, **kwargs)
        after = (after[0] if isinstance(after, tuple) else after)[0]
        pictured = pictures.seen()
        raise _Taken(after if pictured is None else pictured.after(index, after, positions))

    with (
        _attending(model, attend),
        _replaced(layers[:index], _pass),
        _replaced([layer], run),
    ):
        return _taken(model, torch.zeros(len(hidden), dtype=torch.int64), positions)


@torch.no_grad()
def run_row(model: PreTrainedModel, token: int, position: int, attend: Attend) -> Tensor:
    """(1, V) float32 log-softmax of one token, in one pass over all layers.

    `attend` as in `run_layer`. The token is no image's, which lie in prompts alone.
    """
    with _attending(model, attend):
        row = _call(model, torch.tensor([token]), torch.tensor([position]), None)
    return row.log_softmax(dim=-1)


@torch.no_grad()
def log_softmax(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """(n, V) float32 over the whole vocabulary, from the last layer's output (n, hidden)."""

    def end(_embedded: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return hidden[None]

    count = len(hidden)
    with _replaced(layers_of(model), end):
        tokens, positions = torch.zeros(count, dtype=torch.int64), torch.arange(count)
        return _call(model, tokens, positions, None).log_softmax(dim=-1)


class _Taken(Exception):
    """Ends a forward pass of which only `hidden` (n, hidden) is wanted."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("not an error: the rest of the forward pass is not needed")
        self.hidden = hidden


def _call(
    model: PreTrainedModel,
    tokens: Tensor | None,
    positions: Tensor,
    cache: Cache | None,
    **options: Any,
) -> Tensor:
    """(n, V) logits of the model's own forward on tokens (n,) at positions (n,)."""
    at = positions[None]
    if (pictured := pictures.seen()) is not None:
        rows = pictured.rows_of(positions)
        at = rows if len(rows) == 1 else rows[:, None]
    return model(
        None if tokens is None else tokens[None],
        position_ids=at,
        past_key_values=cache,
        use_cache=cache is not None,
        **options,
    ).logits[0]


@torch.no_grad()
def _taken(model: PreTrainedModel, tokens: Tensor, positions: Tensor) -> Tensor:
    try:
        _call(model, tokens, positions, None)
    except _Taken as taken:
        return taken.hidden
    raise AssertionError(f"{type(model).__name__} ran without the layer that was to end it")


def _pass(hidden: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return hidden


@contextmanager
def _replaced(layers: Any, forward: Callable[..., Tensor]) -> Iterator[None]:
    """Every layer's forward is `forward` while the block runs."""
    for layer in layers:
        layer.__dict__["forward"] = forward
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["forward"]


# What layers store in the place of keys and values; none where they are stored as they are.
_stores: list[Callable[[int, int, Tensor], Tensor]] = []


@contextmanager
def storing(store: Callable[[int, int, Tensor], Tensor]) -> Iterator[None]:
    """Layers attend to `store` of keys and values while the block runs.

    store: layer index, 0 for keys or 1 for values, and entries (G, n, D) -> the same, rounded as a
        quantized cache does.
    """
    _stores.append(store)
    try:
        yield
    finally:
        _stores.pop()


# The call whose soft cap and sinks the next `attention` is to apply.
_unapplied: list[Call] = []
# The innermost block of `_attending` is the one in force.
_in_force: list[Callable[[Call], Tensor]] = []


@contextmanager
def _attending(
    model: PreTrainedModel, attend: Callable[..., Tensor], *, by_call: bool = False
) -> Iterator[None]:
    """The model's attention is `attend` while the block runs: an `Attend`, or it takes a `Call`."""
    config = text_config(model)
    before = config._attn_implementation
    config._attn_implementation = NAME
    _in_force.append(attend if by_call else _plain(attend))
    try:
        yield
    finally:
        _in_force.pop()
        config._attn_implementation = before


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: (1, heads, n, D) each -> (1, n, H, D)."""
    layer, keys, values = module.layer_idx, key[0], value[0]
    for store in _stores:
        keys, values = store(layer, 0, keys), store(layer, 1, values)
    out = _in_force[-1](
        Call(
            module,
            layer,
            query[0],
            keys,
            values,
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            options.get("sliding_window"),
            options.get("softcap"),
            options.get("s_aux"),
        )
    )
    return out.transpose(0, 1)[None], None


def _plain(attend: Attend) -> Callable[[Call], Tensor]:
    """`attend` for calls that have nothing it would ignore; others raise ValueError."""

    def called(call: Call) -> Tensor:
        if call.window is not None:
            raise ValueError(f"{type(call.module).__name__} has window, which is ignored here")
        if call.softcap is not None or call.sinks is not None:
            _unapplied.append(call)
        out = attend(call.layer, call.query, call.key, call.value, call.scale)
        if _unapplied:
            _unapplied.clear()
            raise ValueError(f"{type(call.module).__name__} has softcap or sinks, ignored here")
        return out

    return called


AttentionInterface.register(NAME, _attention)
