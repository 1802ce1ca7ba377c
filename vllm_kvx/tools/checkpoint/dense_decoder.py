"""A decoder run layer by layer in plain torch, to look at what its layers see.

The offline tools use it: one prompt at a time, no cache and no vLLM, on CPU, on one GPU, or on
several where the weights need them (placement.py). Attention
goes through SDPA and everything else through slices of the rows, so that a prompt of 128K tokens
needs a few times its hidden states beside the weights. Only the attention rows of the prompt's last
queries are ever materialised.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from vllm_kvx.equations.saliency import window_attention
from vllm_kvx.errors import ToolError
from vllm_kvx.tools.checkpoint.loading import LanguageModel, load_weights
from vllm_kvx.tools.checkpoint.placement import place

# Rows that projections and the MLP take at once: it bounds their intermediate values.
_SLICE = 4096


@dataclass(frozen=True)
class Rows:
    """Some tokens of one prompt between two layers, in the order of their positions.

    hidden: (n, hidden), in the model's dtype.
    cos, sin: (n, D), the rotary embedding of the tokens' positions in the prompt.
    """

    hidden: Tensor
    cos: Tensor
    sin: Tensor

    def __len__(self) -> int:
        return self.hidden.shape[0]

    def select(self, indices: Tensor) -> "Rows":
        """The rows at ascending `indices` (m,), with the positions that they had."""
        indices = indices.to(self.hidden.device)
        return Rows(self.hidden[indices], self.cos[indices], self.sin[indices])

    def to(self, device: torch.device) -> "Rows":
        """Copies the rows to `device`, if they are not there."""
        return Rows(self.hidden.to(device), self.cos.to(device), self.sin.to(device))

    def then(self, later: "Rows") -> "Rows":
        """These rows and `later` ones, which follow them in the sequence."""
        mine, others = (self.hidden, self.cos, self.sin), (later.hidden, later.cos, later.sin)
        return Rows(*(torch.cat(pair) for pair in zip(mine, others, strict=True)))


@dataclass
class Cache:
    """Keys and values of the tokens so far, by layer; a layer may hold fewer tokens than another.

    layers: (keys, values) of each layer, (G, n, D) each, rotated.
    """

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append tokens to layer `index`, (G, m, D) each; returns all that it holds then."""
        if index == len(self.layers):
            self.layers.append((keys, values))
        else:
            old_keys, old_values = self.layers[index]
            self.layers[index] = (
                torch.cat([old_keys, keys], dim=1),
                torch.cat([old_values, values], dim=1),
            )
        return self.layers[index]

    def copy(self) -> "Cache":
        """A cache with the same tokens; what is added to either is not in the other."""
        return Cache(list(self.layers))


def sliding_window(config: PretrainedConfig) -> int | None:
    """The longest prompt, in tokens, that every layer sees in full; None without a limit."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types and "sliding_attention" not in layer_types:
        return None
    return getattr(config, "sliding_window", None)


def sliding_layers(config: PretrainedConfig) -> tuple[int, ...]:
    """The layers that slide over a window, where others have full attention; else none."""
    kinds = getattr(config, "layer_types", None) or []
    found = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    return found if len(found) < len(kinds) else ()


def refuse_windows(config: PretrainedConfig) -> None:
    """Raise ToolError where only some layers slide: the papers' criteria compare them all."""
    if sliding_layers(config):
        raise ToolError(
            "some layers of this model slide over a window, which the paper's criterion does not "
            "know: leave out --criterion paper"
        )


class DenseDecoder:
    """The layers of a model that `load_config` takes, to be run one after the other.

    Sliding windows are not applied: prompts are to be no longer than `sliding_window(config)`.
    A layer's rows, keys and values are on its device; all else that is returned is on `device`.
    """

    def __init__(
        self,
        model: PreTrainedModel | LanguageModel,
        devices: Sequence[torch.device] | None = None,
    ) -> None:
        """devices: of each layer, if they are on several; the first one has all else."""
        self._model: Any = model.eval()
        self.num_layers = len(self._model.model.layers)
        self.num_kv_heads: int = self._model.config.num_key_value_heads
        self.device = devices[0] if devices else model.device
        self._devices = list(devices or [self.device] * self.num_layers)
        self.stop_tokens = _stop_tokens(model)

    @classmethod
    def load(
        cls,
        name: str,
        device: str = "auto",
        dtype: str = "auto",
        revision: str | None = None,
        spread: bool = False,
    ) -> "DenseDecoder":
        """The model of a directory or hub name, with its weights.

        device: `auto` is the GPU if there is one.
        spread: whether `auto` may take further GPUs, if the weights need them.
        dtype: a torch type's name; `auto` is the checkpoint's on a GPU, and float32 on CPU, where
            the narrower types are slow and save only memory.

        Raises:
            ToolError: there is no such device, or the weights cannot be loaded, are not all there
                or do not fit.
        """
        target = choose_device(device)
        if dtype == "auto" and target.type == "cpu":
            dtype = "float32"
        model = load_weights(name, revision, dtype if dtype == "auto" else getattr(torch, dtype))
        return cls(model, place(model, target, spread=spread and device == "auto"))

    def embed(self, token_ids: Sequence[int]) -> Rows:
        """The rows of a whole prompt before layer 0."""
        return self._embed(token_ids)

    def layers(
        self, rows: Rows, first: int = 0, window: int = 0, cache: Cache | None = None
    ) -> Iterator[tuple[Rows, Tensor | None]]:
        """Run layers `first` to the last; after each one its output and its window attention.

        Rows see each other causally and nothing else. The attention is (H, w, n) float32, softmax
        rows of the last `window` rows, at most n; None if `window` is 0.

        cache: takes each layer's keys and values; it holds those of the layers below `first`.
        """
        for index in range(first, self.num_layers):
            rows, attention = self._layer(index, rows, window, cache)
            yield rows, attention

    @torch.no_grad()
    def last_state(self, rows: Rows) -> Tensor:
        """(hidden,) float32: the last row of the last layer's output after the final norm."""
        return self._model.model.norm(rows.hidden[-1:].to(self.device))[0].float()

    def finish(self, rows: Rows, first: int) -> Tensor:
        """`last_state` after layers `first` to the last."""
        for output, _ in self.layers(rows, first):
            rows = output
        return self.last_state(rows)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """(m, vocabulary) float32 of rows (m, hidden) of the last layer's output."""
        return self._model.lm_head(self._model.model.norm(hidden.to(self.device))).float()

    def extend(
        self, token_ids: Sequence[int], position: int, cache: Cache
    ) -> tuple[Tensor, list[Tensor]]:
        """Run m generated tokens, as `extension` does.

        Returns their logits (m, vocabulary) and, by layer, their attention summed over them and
        over the heads, (n,) float32 over the n tokens that the layer held before.
        """
        mass = []
        for output, attention in self.extension(token_ids, position, cache):
            rows = output
            mass.append(attention.sum(dim=(0, 1))[: -len(token_ids)])
        return self.logits(rows.hidden), mass

    def extension(
        self, token_ids: Sequence[int], position: int, cache: Cache
    ) -> Iterator[tuple[Rows, Tensor]]:
        """Run m generated tokens, which see each other causally and what `cache` holds.

        After each layer come their rows and their attention, (H, m, n + m) float32 over the n
        tokens that the layer held before and themselves.

        position: the first one's, whatever the cache holds. The cache takes the tokens.
        """
        rows = self._embed(token_ids, position)
        for index in range(self.num_layers):
            rows, attention = self._extension(index, rows, cache)
            yield rows, attention

    @torch.no_grad()
    def _embed(self, token_ids: Sequence[int], position: int = 0) -> Rows:
        """The rows of tokens at `position` and after it, before layer 0."""
        tokens = torch.tensor(token_ids, device=self.device)
        hidden = self._model.model.embed_tokens(tokens)
        # Once for all: some rotary embeddings depend on how many there are.
        positions = torch.arange(position, position + len(tokens), device=self.device)
        cos, sin = self._model.model.rotary_emb(hidden[None], positions[None])
        return Rows(hidden, cos[0], sin[0])

    @torch.no_grad()
    def _extension(self, index: int, rows: Rows, cache: Cache) -> tuple[Rows, Tensor]:
        layer, count = self._model.model.layers[index], len(rows)
        rows = rows.to(self._devices[index])
        query, key, value = _project(layer, rows)
        keys, values = cache.add(index, key, value)
        later = torch.ones(count, count, dtype=torch.bool, device=query.device).triu(1)
        grouped = query.unflatten(0, (len(keys), -1)).float()  # (G, H / G, m, D)
        scores = grouped @ keys[:, None].float().transpose(2, 3) * layer.self_attn.scaling
        scores[..., -count:].masked_fill_(later, float("-inf"))
        attention = scores.softmax(dim=-1)  # (G, H / G, m, n + m)
        mixed = (attention @ values[:, None].float()).to(query.dtype).flatten(0, 1)
        hidden = _finish(layer, rows.hidden, mixed.transpose(0, 1))
        return replace(rows, hidden=hidden), attention.flatten(0, 1).to(self.device)

    @torch.no_grad()
    def _layer(
        self, index: int, rows: Rows, window: int, cache: Cache | None
    ) -> tuple[Rows, Tensor | None]:
        layer = self._model.model.layers[index]
        rows = rows.to(self._devices[index])
        attn = layer.self_attn
        query, key, value = _project(layer, rows)
        if cache is not None:
            cache.add(index, key, value)
        heads, count, head_dim = query.shape
        shared = heads // key.shape[0]
        groups = [slice(head, head + shared) for head in range(0, heads, shared)]
        attention = None
        if window:
            # By KV head: the reference math copies the keys for every query head, in float32.
            attention = torch.cat(
                [
                    window_attention(query[group, -window:], key[head, None], attn.scaling)
                    for head, group in enumerate(groups)
                ]
            ).to(self.device)
        mixed = query.new_empty(count, heads, head_dim)
        for head, group in enumerate(groups):
            # By KV head too: SDPA's grouped-query path falls back to a full matrix in float32.
            keys, values = (x[head].expand(shared, -1, -1)[None] for x in (key, value))
            mixed[:, group] = F.scaled_dot_product_attention(
                query[None, group], keys, values, is_causal=True, scale=attn.scaling
            )[0].transpose(0, 1)
        return replace(rows, hidden=_finish(layer, rows.hidden, mixed)), attention


def choose_device(name: str) -> torch.device:
    """The device that `name` means; ToolError if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ToolError(f"device must be auto, cpu, cuda or cuda:<int>, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ToolError(f"this machine has no {name} that torch can use: use --device cpu")
    return device


def _stop_tokens(model: Any) -> frozenset[int]:
    """The tokens that end what the model says."""
    found: set[int] = set()
    for config in (model.config, model.generation_config):
        tokens = getattr(config, "eos_token_id", None)
        if tokens is not None:
            found.update([tokens] if isinstance(tokens, int) else tokens)
    return frozenset(found)


def _project(layer: Any, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (H, n, D), keys and values (G, n, D) of a layer, rotated."""
    attn, count = layer.self_attn, len(rows)
    projections = (attn.q_proj, attn.k_proj, attn.v_proj)
    query, key, value = (
        rows.hidden.new_empty(proj.out_features // attn.head_dim, count, attn.head_dim)
        for proj in projections
    )
    for part in _slices(count):
        normed = layer.input_layernorm(rows.hidden[part])
        q, k, v = (proj(normed).unflatten(-1, (-1, attn.head_dim)) for proj in projections)
        if hasattr(attn, "q_norm"):
            q, k = attn.q_norm(q), attn.k_norm(k)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        q, k = apply_rotary_pos_emb(q, k, rows.cos[None, part], rows.sin[None, part])
        query[:, part], key[:, part], value[:, part] = q[0], k[0], v[0]
    return query, key, value


def _finish(layer: Any, before: Tensor, mixed: Tensor) -> Tensor:
    """A layer's output (n, hidden) from its input and what its heads read, (n, H, D)."""
    hidden = torch.empty_like(before)
    for part in _slices(len(before)):
        residual = before[part] + layer.self_attn.o_proj(mixed[part].flatten(1))
        # Experts want a batch.
        hidden[part] = residual + layer.mlp(layer.post_attention_layernorm(residual)[None])[0]
    return hidden


def _slices(count: int) -> Iterator[slice]:
    for begin in range(0, count, _SLICE):
        yield slice(begin, min(begin + _SLICE, count))
