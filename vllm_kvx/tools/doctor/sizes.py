"""What of a server decides how many prompt tokens its KV pool holds."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_kvx.cache.group_size import (
    GroupChoice,
    blocks_per_token,
    group_by_vllm,
    group_layers,
)
from vllm_kvx.config.cache_dtype import skipped_layers
from vllm_kvx.config.policy_layers import num_kv_heads
from vllm_kvx.policy.layout import Layout
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.storage import storage_of, stored_len
from vllm_kvx.tools.doctor.asked_sizes import sizes_in
from vllm_kvx.tools.doctor.findings import Context, Request
from vllm_kvx.tools.doctor.weights import element_bytes, weights_bytes
from vllm_kvx.tools.kv_layers import KVLayers

GIB = 2**30
_FLOAT32 = 4
# vLLM's defaults, for where it cannot be asked.
_BLOCK_SIZE, _MEMORY_SHARE = 16, 0.92


@dataclass(frozen=True)
class Sizes:
    """A server's sizes. Bytes and heads are those of one rank.

    layers: of the model. kv_heads, head_dim: of its cache. hidden: of its states.
    entry_bytes: of one number in the cache, but in `skipping` layers, which skip a quantized one
        and have `state_bytes`. scale_bytes: of the scales of a head's key and value, where each has
        its own. state_bytes: of one number of a hidden state.
    block_size: tokens of a KV block. longest: tokens of the longest prompt. step: tokens of a step.
    memory_share: of a GPU's memory that vLLM takes. ranks: tensor parallel.
    kv_layers: what its layers hold, where some slide or keep a state; else None.
    from_server: whether vLLM said so; else they are of config.json and vLLM's defaults, but for
        those of `sizes_given`.
    """

    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    entry_bytes: int
    state_bytes: int
    block_size: int
    longest: int
    step: int
    memory_share: float
    ranks: int
    from_server: bool
    kv_layers: KVLayers | None = None
    skipping: int = 0
    scale_bytes: int = 0

    @classmethod
    def of(cls, context: Context) -> "Sizes":
        """Those of the server's configuration, if there is one, else of the model's.

        Raises:
            KeyError: config.json lacks one.
        """
        if context.vllm_config is not None:
            return cls._of_server(context.vllm_config)
        return cls._of_model(context.text_config, context.request, sizes_given(context))

    @classmethod
    def _of_server(cls, config: Any) -> "Sizes":
        from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

        model, cache = config.model_config, config.cache_config
        entry = kv_cache_dtype_str_to_dtype(cache.cache_dtype, model)
        sizes = cls(
            layers=model.get_total_num_hidden_layers(),
            kv_heads=max(num_kv_heads(model) // config.parallel_config.tensor_parallel_size, 1),
            head_dim=model.get_head_size(),
            hidden=model.get_hidden_size(),
            entry_bytes=entry.itemsize,
            state_bytes=model.dtype.itemsize,
            block_size=cache.block_size,
            longest=model.max_model_len,
            step=config.scheduler_config.max_num_batched_tokens,
            memory_share=cache.gpu_memory_utilization,
            ranks=config.parallel_config.tensor_parallel_size,
            from_server=True,
            skipping=len(skipped_layers(config)),
            scale_bytes=2 * _FLOAT32 if cache.cache_dtype.endswith("per_token_head") else 0,
        )
        token = sizes.page_bytes() / sizes.block_size
        states = _state_bytes(config)
        kv_layers = KVLayers.of(model.hf_text_config, None if states is None else states / token)
        return replace(sizes, kv_layers=kv_layers)

    @classmethod
    def _of_model(
        cls, config: dict[str, Any], request: Request, given: dict[str, float]
    ) -> "Sizes":
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        kv_heads = config.get("num_key_value_heads") or heads
        longest = int(given.get("max_model_len", config["max_position_embeddings"]))
        # vLLM serves float32 checkpoints in 16 bits, too.
        return cls(
            layers=config["num_hidden_layers"],
            kv_heads=max(kv_heads // request.ranks, 1),
            head_dim=config.get("head_dim") or hidden // heads,
            hidden=hidden,
            entry_bytes=2,
            state_bytes=min(element_bytes(config), 2) or 2,
            block_size=int(given.get("block_size", _BLOCK_SIZE)),
            longest=longest,
            step=int(given.get("max_num_batched_tokens", longest)),
            memory_share=given.get("gpu_memory_utilization", _MEMORY_SHARE),
            ranks=request.ranks,
            from_server=False,
            kv_layers=KVLayers.of(config),
        )

    @property
    def policy_layers(self) -> int:
        """The layers that policies are about."""
        return self.layers if self.kv_layers is None else self.kv_layers.full

    def page_bytes(self) -> float:
        """Bytes of a layer's keys and values in one block, in stock vLLM, on average."""
        skipping = self.skipping / self.layers
        more = (self.state_bytes - self.entry_bytes) * skipping
        entry = 2 * self.head_dim * (self.entry_bytes + more) + self.scale_bytes * (1 - skipping)
        return self.block_size * self.kv_heads * entry

    def sidecar_bytes(self, layout: Layout) -> int:
        """Bytes that a page holds besides, for retrieval.

        Raises:
            ImportError: torch or vLLM is missing, and there is a sidecar.
            ValueError: the block size does not suit the sidecar.
        """
        if layout.sidecar is None:
            return 0
        from vllm_kvx.indexes.base import PageShape
        from vllm_kvx.indexes.table import INDEXES

        shape = PageShape(self.kv_heads, self.block_size, self.head_dim, layout.sidecar.group)
        return INDEXES[layout.sidecar.index].page_bytes(shape)


@dataclass(frozen=True)
class Pool:
    """A KV pool's arithmetic under a policy; bytes are those of one rank.

    choice: how layers are shared out to KV groups. stage_sizes: layers of each stage; of them the
    last `sliding` slide over a window, where policies propagate beside such layers, and else only
    policy layers are there. token_bytes: what a prompt token takes on average, padding and sidecar
    included. stock_token_bytes: in stock vLLM. Both count what other layers hold, as far as it is
    known.
    """

    choice: GroupChoice
    stage_sizes: Sequence[int]
    token_bytes: float
    stock_token_bytes: float
    sliding: int = 0

    @classmethod
    def of(cls, policy: KVPolicy, layout: Layout, sizes: Sizes, prompt_len: int) -> "Pool":
        """The arithmetic of a server with this layout, whose prompts have `prompt_len` tokens.

        Raises:
            ImportError, ValueError: as ``Sizes.sidecar_bytes``.
        """
        if layout.windows is not None:
            return cls._beside_windows(policy, layout, sizes, prompt_len)
        layers = sizes.policy_layers
        stages = layout.stage_sizes(layers)
        choice = group_layers(stages)
        groups = [
            (start, sizes.block_size)
            for start, count in zip(layout.stage_starts, choice.groups_per_stage, strict=True)
            for _ in range(count)
        ]
        block = choice.size * (sizes.page_bytes() + sizes.sidecar_bytes(layout))
        entry = sizes.page_bytes() / sizes.block_size
        others = 0.0
        if sizes.kv_layers is not None:
            others = sizes.kv_layers.other_entries(prompt_len) * entry / prompt_len
        return cls(
            choice,
            stages,
            blocks_per_token(policy, prompt_len, groups, layers) * block + others,
            layers * entry + others,
        )

    @classmethod
    def _beside_windows(
        cls, policy: KVPolicy, layout: Layout, sizes: Sizes, prompt_len: int
    ) -> "Pool":
        """The same where policies propagate and some layers slide, in stages as all others are."""
        assert sizes.kv_layers is not None
        window, size, count = sizes.kv_layers.window, sizes.block_size, sizes.layers
        large = sizes.kv_layers.window_entry
        stages = layout.stages
        # The layers that slide below the first cut are vLLM's own, behind all stages.
        layers = [0] * (len(stages) + 1)
        for layer in range(count):
            slides = layer in layout.sliding
            stage = layout.sliding_stage_of(layer) if slides else layout.stage_of(layer)
            layers[len(stages) if stage is None else stage] += 1
        settled = prompt_len + policy.num_generated
        held = [
            large
            * min(
                storage_of(policy, prompt_len, stage.start, size, count, slides=True).kept, window
            )
            if stage.slides
            else stored_len(policy, prompt_len, settled, stage.start, size, count)
            for stage in stages
        ]
        held.append(large * min(prompt_len, window))
        found = [each for each in zip(layers, held, strict=True) if each[0]]
        choice = group_by_vllm([each for each, _ in found])
        stored = sum(
            groups * each for groups, (_, each) in zip(choice.groups_per_stage, found, strict=True)
        )
        entry = sizes.page_bytes() / size
        full = sum(not stage.slides for stage in stages)
        return cls(
            choice,
            [each for each, _ in found],
            choice.size * stored * entry / prompt_len,
            (sizes.policy_layers + sizes.kv_layers.other_entries(prompt_len) / prompt_len) * entry,
            sliding=sum(each > 0 for each in layers[full:]),
        )

    def says(self) -> str:
        """How the layers are shared out, in words."""
        last = f"; the last {self.sliding} of these stages slide over a window"
        return self.choice.says(self.stage_sizes) + (last if self.sliding else "")


@dataclass(frozen=True)
class Memory:
    """What a rank's KV pool gets, in bytes; `says` tells how it comes about."""

    pool: int
    says: str


def memory_of(context: Context, sizes: Sizes, stash_tokens: int) -> Memory | None:
    """The KV pool's memory: of the GPU that was named or found, or as set for a CPU.

    None if there is no GPU, and none was named.
    """
    given = context.request.gpu_memory
    total = given * GIB if given is not None else context.gpu_bytes
    if total is None or (context.is_cpu and given is None):
        space = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
        if not context.is_cpu or not space or not space.isdecimal():
            return None
        return Memory(int(space) * GIB, f"VLLM_CPU_KVCACHE_SPACE={space} GiB")
    assert context.directory is not None
    server: Any = context.vllm_config
    quantization = None if server is None else server.model_config.quantization
    weights, how = weights_bytes(
        context.directory, context.text_config, sizes.state_bytes, quantization
    )
    weights //= sizes.ranks
    stash = stash_tokens * sizes.hidden * sizes.state_bytes
    pool = int(total * sizes.memory_share) - weights - stash
    words = [
        f"{sizes.memory_share:g} of {size_of(total)}",
        f"less {size_of(weights)} of weights{' a GPU' if sizes.ranks > 1 else ''} ({how})",
        *([f"{size_of(stash)} of stash"] if stash else []),
        "and what activations and CUDA graphs take",
    ]
    return Memory(pool, ", ".join(words))


def sizes_given(context: Context) -> dict[str, float]:
    """Those that the server's flags ask for, see ``asked_sizes``; not a length beyond the model's.

    vLLM refuses such a one, and a server whose flags are mended has another.
    """
    given, longest = context.sizes, context.text_config["max_position_embeddings"]
    if given is None:
        given = sizes_in(context.request.serve_args)
    beyond = given.get("max_model_len", 0) > longest
    return {name: size for name, size in given.items() if not beyond or name != "max_model_len"}


def size_of(num_bytes: float) -> str:
    """A number of bytes in words: "1.5 GiB", or in MiB if it is below one GiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"


def _state_bytes(config: Any) -> float | None:
    """What the states of a request take in all recurrent layers; None if vLLM does not say.

    config: vLLM's, of a server. Bytes of one rank.
    """
    model = config.model_config
    if not model.is_hybrid:
        return None
    try:
        found, _ = model.registry.resolve_model_cls(model.architectures, model_config=model)
        shapes = found.get_mamba_state_shape_from_config(config)
        dtypes = found.get_mamba_state_dtype_from_config(config)
    except Exception:  # Models raise what they like, and some import what is not here.
        return None
    layer = sum(
        math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    layers = KVLayers.of(model.hf_text_config)
    return None if layers is None else float(layer * layers.recurrent)
