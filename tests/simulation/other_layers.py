"""Layers beside those with full attention: what they hold, and what each step has to show them.

A window's entry is made of its token as any other layer's is. A state is made of all tokens before
it, so it is the entry of the last one. vLLM says where both are; they are held against what stock
vLLM would have shown: the tokens of the request, whatever its policy dropped elsewhere.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, SlidingWindowSpec

from simulation.cache import Cache, Mismatch
from simulation.live import Ints, Live
from vllm_kvx.cache.group_size import grouped

if TYPE_CHECKING:
    from simulation.model import Batch

KV_HEADS, HEAD_SIZE = 2, 32


@dataclass(frozen=True)
class Others:
    """The layers of a model that follow no policy, all of one kind.

    window: tokens that a row sees, its own among them; 0 where layers keep a state.
    mode: vLLM's ``mamba_cache_mode`` of these.
    checkpoints: whether a layer also writes what its state was within a chunk, as Mamba 2's do.
    among: their numbers in the decoder, where policies propagate, which count all layers; else
        half of them run before those that follow policies, and half after.
    """

    layers: int
    window: int = 0
    mode: Literal["none", "align"] = "align"
    checkpoints: bool = False
    among: tuple[int, ...] = ()

    @classmethod
    def sliding(cls, *among: int, window: int) -> "Others":
        """Layers that slide among those that policies propagate past."""
        return cls(len(among), window=window, among=among)

    @property
    def is_state(self) -> bool:
        return self.window == 0

    @property
    def may_share(self) -> bool:
        """Whether vLLM has a prefix cache for them."""
        return not self.is_state or self.mode == "align"

    def num_groups(self, stage_sizes: Sequence[int], starts: Sequence[int]) -> int:
        """KV groups, these layers' included: vLLM chooses their size, see ``group_size``.

        starts: the first layer of every stage.
        """
        stages = Counter(bisect_right(starts, number) - 1 for number in self.among)
        full = [size - stages[stage] for stage, size in enumerate(stage_sizes)]
        sizes = (*full, *(stages.values() or (self.layers,)))
        most, least = max(sizes), min(sizes)
        return sum(grouped(sizes, most if most < 1.5 * least else least).groups_per_stage)

    def model(self, num_layers: int) -> dict[str, Any]:
        """What the configuration of a model has with these beside `num_layers` others.

        Layers with a state stand in it as some with a window: the simulation makes its own.
        """
        if not self.layers:
            return {"num_hidden_layers": num_layers}
        places = self.among or range(num_layers, num_layers + self.layers)
        kinds = ["full_attention"] * (num_layers + self.layers)
        for place in places:
            kinds[place] = "sliding_attention"
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "head_dim": HEAD_SIZE,
            "num_hidden_layers": len(kinds),
            "layer_types": kinds,
            "sliding_window": self.window or 16,
        }

    def made(self, first: int) -> "list[WindowLayer | StateLayer]":
        """Its layers, numbered from `first` on if they are not among others."""
        kind = StateLayer if self.is_state else WindowLayer
        return [kind(n, self) for n in self.among or range(first, first + self.layers)]


class WindowLayer(Attention):
    """What the project and vLLM read of a layer that slides over a window."""

    def __init__(self, index: int, others: Others) -> None:
        nn.Module.__init__(self)
        self.index, self.window = index, others.window
        self.layer_name, self.sliding_window = f"layers.{index}.window", others.window
        self.has_sink, self.impl = False, SimpleNamespace(forward=None)
        self.attn_backend = SimpleNamespace(  # type: ignore[assignment]
            get_name=lambda: "TRITON_ATTN", forward_includes_kv_cache_update=False
        )

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        block_size = vllm_config.cache_config.block_size
        assert block_size is not None
        return SlidingWindowSpec(
            block_size=block_size,
            num_kv_heads=KV_HEADS,
            head_size=HEAD_SIZE,
            dtype=torch.float32,
            sliding_window=self.window,
        )


class StateLayer:
    """The same of a layer that keeps a state, which is smaller than a page of keys and values."""

    def __init__(self, index: int, others: Others) -> None:
        self.index, self._mode, self.checkpoints = index, others.mode, others.checkpoints
        self.layer_name = f"layers.{index}.state"

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        size, longest = vllm_config.cache_config.block_size, vllm_config.model_config.max_model_len
        assert size is not None
        return MambaSpec(
            block_size=size if self._mode == "align" else longest,
            shapes=((3, HEAD_SIZE),),
            dtypes=(torch.float32,),
            mamba_cache_mode=self._mode,
            num_prefill_checkpoint_blocks=int(self.checkpoints),
            prefill_checkpoint_alignment=1 if self.checkpoints else None,
        )


class OtherLayers:
    """Runs these layers, over the cache that all groups have their blocks in."""

    def __init__(
        self,
        layers: "Sequence[WindowLayer | StateLayer]",
        groups: dict[str, int],
        block_sizes: Sequence[int],
        cache: Cache,
        live: dict[int, Live],
        counts: Counter[str],
    ) -> None:
        """groups: by layer name. block_sizes: tokens, by group. live: by request state."""
        self._layers, self._groups, self._block_sizes = layers, groups, block_sizes
        self._cache, self._live, self._counts = cache, live, counts

    def run(self, batch: "Batch", part: slice) -> None:
        """Some of the layers in one step.

        Raises:
            Mismatch: one reads what is not its request's, or writes where another one does.
        """
        made = [
            (self._live[int(request)], int(batch.positions[begin]), int(batch.positions[end - 1]))
            for request, begin, end in zip(
                batch.requests, batch.starts[:-1], batch.starts[1:], strict=True
            )
        ]
        for layer in self._layers[part]:
            metadata: Any = batch.metadata[layer.layer_name]
            ends = np.array([last + 1 for *_, last in made])
            if (
                (metadata.requests != batch.requests).any()
                or (metadata.starts != batch.starts).any()
                or (metadata.lens != ends).any()
            ):
                raise Mismatch(f"layer {layer.index}: it runs {metadata}, not the whole batch")
            if isinstance(layer, WindowLayer):
                self._slide(batch, layer, metadata.table, made)
            else:
                self._step(layer, metadata.table, made)

    def _slide(
        self, batch: "Batch", layer: WindowLayer, table: Ints, made: list[tuple[Live, int, int]]
    ) -> None:
        slots = batch.slots[self._groups[layer.layer_name]]
        entries = [of(one, np.arange(begin, last + 1), layer.index) for one, begin, last in made]
        self._disjoint(layer.index, [slots[a:b] for a, b in _spans(batch.starts)])
        self._cache.write(layer.index, slots, np.concatenate(entries))
        for row, (one, begin, last) in enumerate(made):
            at = np.arange(max(begin - layer.window + 1, 0), last + 1)
            held = self._cache.read(layer.index, table[row], at)
            wrong = at[held != of(one, at, layer.index)]
            if len(wrong):
                raise Mismatch(
                    f"{one}, layer {layer.index}: in the window of {begin} to {last} it sees "
                    f"others' entries at {wrong.tolist()}"
                )
            self._counts["windows"] += last >= layer.window

    def _step(self, layer: StateLayer, table: Ints, made: list[tuple[Live, int, int]]) -> None:
        size = self._block_sizes[self._groups[layer.layer_name]]
        blocks = [int(table[row, last // size]) for row, (*_, last) in enumerate(made)]
        kept = self._checkpoints(table, made, size) if layer.checkpoints else []
        written = [*blocks, *(block for block, *_ in kept)]
        if len(set(written)) < len(written):
            raise Mismatch(f"layer {layer.index}: requests write their states to {written}")
        for block, (one, begin, last) in zip(blocks, made, strict=True):
            before, after = of(one, np.array([max(begin - 1, 0), last]), layer.index).tolist()
            if begin and self._cache.state(layer.index, block) != before:
                raise Mismatch(
                    f"{one}, layer {layer.index}: the state in block {block} is not that after "
                    f"{begin} tokens"
                )
            self._cache.write_state(layer.index, block, after)
            self._counts["states"] += begin > 0
        for block, one, position in kept:
            (state,) = of(one, np.array([position - 1]), layer.index).tolist()
            self._cache.write_state(layer.index, block, state)
            self._counts["checkpoints"] += 1

    def _checkpoints(
        self, table: Ints, made: list[tuple[Live, int, int]], size: int
    ) -> list[tuple[int, Live, int]]:
        """States that are kept on the way: the block, the request and the tokens before each."""
        begins = [begin for _, begin, _ in made]
        ends = [last + 1 for *_, last in made]
        offsets, columns = compute_mamba_prefill_checkpoints(
            seq_lens=ends,
            query_lens=[end - begin for begin, end in zip(begins, ends, strict=True)],
            hash_block_size=size,
            mamba_block_size=size,
            checkpoint_alignment=1,
            drop_eagle_block=False,
            cache_hit_alignment_tokens=size,
        )
        found = [
            (int(table[row, column]), made[row][0], begins[row] + offset)
            for row, (offset, column) in enumerate(zip(offsets, columns, strict=True))
            if offset
        ]
        return [each for each in found if each[0]]

    def _disjoint(self, layer: int, slots: Sequence[Ints]) -> None:
        blocks = [np.unique(each // self._cache.block_size) for each in slots]
        every = np.concatenate(blocks)
        if len(np.unique(every)) < len(every):
            raise Mismatch(f"layer {layer}: requests write the same blocks, {blocks}")


def of(one: Live, positions: Ints, layer: int) -> Ints:
    """What a layer makes of these tokens of a request, which all layers below have run."""
    return one.entries(positions, layer, (positions >= one.prompt_len) & one.is_lossy)


def _spans(starts: Ints) -> list[tuple[int, int]]:
    return list(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True))
