"""A checkpoint whose prefill attends to chosen blocks of keys, and whose decode reads everything.

Each setting prefills a prompt by itself; then the settings' caches are decoded together, a row of a
batch each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.answers.recall_attention import Model
from benchmarks.ops.prefill_blocks import (
    Setting,
    attend,
    causal_blocks,
    cover,
    estimate,
    one_bit_keys,
    read_blocks,
)

# Queries of a prompt for which blocks are chosen at once, as vLLM's chunks are.
CHUNK = 8192
DENSE = Setting("dense")


@dataclass
class Reads:
    """Blocks that a prefill read, and what causal attention would read, layer by layer; and the
    most that one block of queries of one KV head read, with how many it could."""

    read: list[int] = field(default_factory=list)
    causal: list[int] = field(default_factory=list)
    most: int = 0

    @property
    def share(self) -> float:
        return sum(self.read) / sum(self.causal)

    @property
    def by_layer(self) -> list[float]:
        return [read / causal for read, causal in zip(self.read, self.causal, strict=True)]


class SparseModel(Model):
    """See the module. `answers` is the way in; `recall` looks at one dense prefill."""

    def __init__(self, path: Any, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(path, device, dtype)
        self.setting, self.reads, self.row = DENSE, Reads(), 0
        # What a prefill measures of other settings on its own queries and keys.
        self.measured: Sequence[Setting] = ()
        self.found: dict[Setting, list[tuple[Tensor, ...]]] = {}

    @torch.inference_mode()
    def answers(
        self, prompt: Sequence[int], settings: Sequence[Setting], max_tokens: int
    ) -> tuple[list[list[int]], list[Reads]]:
        """Greedy answers without their ends, and what prefill read; both by setting."""
        self._make_room(len(settings), len(prompt) + max_tokens)
        self.length, self._run = len(prompt), self._prompt
        firsts, reads = [], []
        for self.row, self.setting in enumerate(settings):
            self.reads = Reads()
            firsts.append(self._next([list(prompt)], 0))
            reads.append(self.reads)
        self._run = self._decode_rows
        tokens = [[first] for first in firsts]
        for step in range(max_tokens - 1):
            if all(row[-1] in self.ends for row in tokens):
                break
            logits = self._logits([row[-1:] for row in tokens], self.length + step, 1)
            for row, token in zip(tokens, logits[:, -1].argmax(dim=-1).tolist(), strict=True):
                row.append(row[-1] if row[-1] in self.ends else token)
        return [[token for token in row if token not in self.ends] for row in tokens], reads

    @torch.inference_mode()
    def recall(
        self, prompt: Sequence[int], settings: Sequence[Setting]
    ) -> dict[Setting, dict[str, float]]:
        """What settings would read of a dense prefill's attention: means over layers and heads.

        `mass` is the share of attention on the blocks that are read, `low` its fifth percentile
        over layers, heads and blocks of queries, `last` the mean of the prompt's last block of
        queries, and `share` the blocks that are read.
        """
        self._make_room(1, len(prompt))
        self.length, self._run = len(prompt), self._prompt
        self.row, self.setting, self.reads = 0, DENSE, Reads()
        self.measured, self.found = settings, {setting: [] for setting in settings}
        try:
            self._logits([list(prompt)], 0, 1)
        finally:
            self.measured = ()
        values = {}
        for setting, parts in self.found.items():
            mass, read, causal = (torch.cat(each) for each in zip(*parts, strict=True))
            last = mass.unflatten(0, (len(self.model.model.layers), -1))[:, -self._heads :]
            values[setting] = {
                "mass": float(mass.mean()),
                "low": float(mass.quantile(0.05)),
                "last": float(last.mean()),
                "share": float(read.sum() / causal.sum()),
            }
        return values

    @property
    def _heads(self) -> int:
        return int(self.model.config.num_attention_heads)

    def _make_room(self, rows: int, length: int) -> None:
        """Caches (rows, G, length, D) of every layer, in place of those that there were."""
        config, layers = self.model.config, self.model.model.layers
        shape = rows, config.num_key_value_heads, length, layers[0].self_attn.head_dim
        if self.keys and self.keys[0].shape[0] == rows and self.keys[0].shape[2] >= length:
            return
        self.keys.clear()
        self.values.clear()
        made = dict(dtype=self.model.dtype, device=self.device)
        for layer in range(len(layers)):
            self.keys[layer], self.values[layer] = (torch.zeros(shape, **made) for _ in range(2))

    def _prompt(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        query, keys, values = q[0], k[0], v[0]
        length, setting = keys.shape[1], self.setting
        self.keys[layer][self.row, :, :length] = keys
        self.values[layer][self.row, :, :length] = values
        if self.measured:
            self._measure(layer, query.float(), keys.float(), scaling)
        exact = keys.float()
        codes = one_bit_keys(exact) if setting.method == "one_bit" else None
        out = torch.empty_like(query)
        read = causal = 0
        total = -(-length // setting.block)
        for first in range(0, length, CHUNK):
            part = slice(first, min(first + CHUNK, length))
            end = part.stop
            reads = read_blocks(
                query[:, part].float(), exact[:, :end], codes, first, scaling, setting
            )
            if setting.tail:
                own = first // setting.block + torch.arange(reads.shape[1], device=self.device)
                every = read_blocks(query[:, part], keys[:, :end], None, first, scaling, DENSE)
                reads = torch.where((own >= total - setting.tail)[:, None], every, reads)
            out[:, part] = attend(
                query[:, part], keys[:, :end], values[:, :end], reads, first, scaling, setting
            )
            counts = causal_blocks(reads, first, end, setting)
            read, causal = read + counts[0], causal + counts[1]
            self.reads.most = max(self.reads.most, int(reads.sum(dim=-1).max()))
        self.reads.read.append(read)
        self.reads.causal.append(causal)
        return out[None]

    def _decode_rows(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        position = self.position
        keys[:, :, position : position + 1], values[:, :, position : position + 1] = k, v
        grouped = q[:, :, 0].unflatten(1, (keys.shape[1], -1))
        end = position + 1
        out = scaled_dot_product_attention(
            grouped, keys[:, :, :end], values[:, :, :end], scale=scaling
        )
        return out.flatten(1, 2)[:, :, None]

    def _logits(self, ids: list[list[int]], start: int, keep: int) -> Tensor:
        self.position = start
        return super()._logits(ids, start, keep)

    def _measure(self, layer: int, query: Tensor, keys: Tensor, scaling: float) -> None:
        """Adds each setting's recall in this layer: by chunk of queries."""
        length, kv_heads = keys.shape[1], len(keys)
        codes = one_bit_keys(keys)
        for first in range(0, length, CHUNK):
            end = min(first + CHUNK, length)
            rows, seen = query[:, first:end], keys[:, :end]
            masses: dict[tuple[int, int], Tensor] = {}
            shares: dict[Setting, Tensor] = {}
            for setting in self.measured:
                sizes = setting.block, setting.key_block
                if sizes not in masses:
                    exact = Setting("oracle", block=sizes[0], key_block=sizes[1])
                    masses[sizes] = estimate(rows, seen, None, first, scaling, exact)
                mass = masses[sizes]
                own = masses[sizes] if setting.method == "oracle" else None
                if own is None:
                    known = Setting(**{**vars(setting), "cover": 1.0})
                    if known not in shares:
                        shares[known] = estimate(rows, seen, codes, first, scaling, known)
                    own = shares[known]
                reads = cover(own, kv_heads, first, end, setting)
                held = mass.unflatten(0, (kv_heads, -1)).mul(reads[:, None]).sum(dim=-1)
                read, causal = causal_blocks(reads, first, end, setting)
                counts = torch.tensor([[read], [causal]], dtype=torch.float64, device=self.device)
                # Blocks of queries outside, heads inside: the last heads are the last block's.
                self.found[setting].append((held.flatten(0, 1).T.flatten(), *counts))
