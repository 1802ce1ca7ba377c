"""The hook around every layer's attention: what the running pass does beside it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

from vllm_kvx.cache.kv_cache_specs import sidecar_bytes
from vllm_kvx.cache.pool_capacity import layer_spec
from vllm_kvx.models.hooked import HookedModel
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.prompt.chosen_rows import ChosenRows, attend_chosen
from vllm_kvx.policy.cache_dtype import INT8
from vllm_kvx.policy.layout import Layout
from vllm_kvx.scores.base import LayerView
from vllm_kvx.worker.attention_backend import why_unusable
from vllm_kvx.worker.decode.retrieval import Retrieval
from vllm_kvx.worker.decode.step import Mode, RetrievalPass
from vllm_kvx.worker.prefill.projections import value_factors
from vllm_kvx.worker.sliding_hooks import SlidingHook


class LayerWork(Protocol):
    """What a pass does beside the attention of its layers, for prompts; such as ``PassWork``."""

    def run(self, hook: Any, query: Tensor, paged: PagedKV) -> None:
        """Does one layer's part of it. query: (N, H, D), of the pass's rows."""


class LayerHook:
    """Wraps one layer's attention implementation; it does nothing unless the pass has work.

    layer: vLLM's attention layer. place: among the policy layers of this worker. index: its number
    among those of the model, which is another where a pipeline shares them out. number: that among
    all of the decoder's. stage: the KV stage it is in. group: its KV group, set once groups are
    formed. value_factors: as ``LayerView`` has them.
    """

    def __init__(
        self,
        hooks: "LayerHooks",
        layer: Any,
        place: int,
        stage: int,
        first: int = 0,
        number: int | None = None,
        retrieves: bool = True,
    ) -> None:
        """first: the number of the worker's first policy layer. number: `index` unless given.

        retrieves: whether it may read less than all, where the server retrieves.
        """
        self.hooks, self.layer, self.stage = hooks, layer, stage
        self.place, self.index = place, first + place
        self.number = self.index if number is None else number
        self.retrieves = retrieves
        self.group = 0
        self.value_factors: Tensor | None = None
        stock: Callable[..., Any] = layer.impl.forward

        def forward(
            layer: Any, query: Tensor, key: Any, value: Any, kv_cache: Tensor, *args: Any, **kw: Any
        ) -> Any:
            hooks = self.hooks
            if not hooks.is_bound:
                hooks._take_scratch(query.device)
            retrieves = hooks.retrieval_pass if self.retrieves else None
            mode = Mode.DENSE if retrieves is None else retrieves.modes[self.stage]
            out = kw.get("output")
            if args and isinstance(args[0], ChosenRows):
                self._attend_chosen(query, args[0], kw["output"], kv_cache)
            elif mode is not Mode.ALL:
                out = stock(layer, query, key, value, kv_cache, *args, **kw)
            if mode is not Mode.DENSE:
                assert retrieves is not None and hooks.retrieval is not None
                hooks.retrieval.run(retrieves, self, self._unquantized(query), kw["output"])
            # Last: it may move entries that this step still reads.
            if hooks.work is not None:
                hooks.work.run(self, self._unquantized(query), self.paged(kv_cache))
            return out

        layer.impl.forward = forward

    def _attend_chosen(
        self, query: Tensor, rows: ChosenRows, out: Tensor, kv_cache: Tensor
    ) -> None:
        """Attention of chosen tokens in the layer that chose them, in the place of vLLM's."""
        query, paged = self._unquantized(query), self.paged(kv_cache)
        attend_chosen(
            query,
            paged,
            rows,
            out.view(query.shape),
            self.scale,
            self.key_scale(paged),
            self.value_scale(paged),
            self.soft_cap,
            self.sinks,
        )

    def view(self, query: Tensor, early_queries: Tensor, paged: PagedKV) -> LayerView:
        """What scores read of the layer; see ``LayerView``."""
        return LayerView(
            query,
            early_queries,
            paged,
            self.scale,
            self.key_scale(paged),
            self.soft_cap,
            self.sinks,
            self.value_factors,
        )

    @property
    def scale(self) -> float:
        """Factor of query times key before the softmax."""
        return float(self.layer.impl.scale)

    @property
    def soft_cap(self) -> float | None:
        """What bounds the scaled products before the softmax, as Gemma 2 does; None without."""
        return float(getattr(self.layer.impl, "logits_soft_cap", None) or 0.0) or None

    @property
    def sinks(self) -> Tensor | None:
        """(H,) one more logit for each of this rank's heads, as in gpt-oss; None without.

        Read anew each time: an attention backend may put another tensor in its place.
        """
        sinks: Tensor | None = getattr(self.layer.impl, "sinks", None)
        return sinks

    @property
    def entry_bytes(self) -> int:
        """Bytes of one KV head's key and value in the cache."""
        return int(2 * self.layer.impl.head_size * self.layer.kv_cache_torch_dtype.itemsize)

    @property
    def block_size(self) -> int:
        """Entries of a block of the layer's cache, which is that of the attention kernel."""
        return int(self.layer.kv_cache.shape[2])

    @property
    def is_int8(self) -> bool:
        """Whether the layer's entries are integers with a scale for each token and head."""
        return bool(self.layer.kv_cache_dtype == INT8)

    def key_scale(self, paged: PagedKV) -> float:
        """What a stored key is multiplied with to get the key."""
        return float(self.layer._k_scale_float) if paged.is_fp8 else 1.0

    def value_scale(self, paged: PagedKV) -> float:
        """What a stored value is multiplied with to get the value."""
        return float(self.layer._v_scale_float) if paged.is_fp8 else 1.0

    def paged(self, kv_cache: Tensor | None = None) -> PagedKV:
        """The layer's cache, addressed entry by entry."""
        layer = self.layer
        kv_cache = layer.kv_cache if kv_cache is None else kv_cache
        if self.is_int8:
            of_int8: PagedKV = layer.impl.paged(kv_cache)
            return of_int8
        if kv_cache.dtype == torch.uint8:
            e5m2 = layer.kv_cache_dtype == "fp8_e5m2"
            kv_cache = kv_cache.view(torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn)
        isa = getattr(layer, "isa", None) if kv_cache.device.type == "cpu" else None
        return PagedKV.of(kv_cache, layer.impl.head_size, cpu_isa=isa)

    def _unquantized(self, query: Tensor) -> Tensor:
        """(N, H, D) in the model's dtype."""
        query = query.view(query.shape[0], self.layer.impl.num_heads, self.layer.impl.head_size)
        if query.dtype.itemsize == 1:  # Quantised for the attention kernel.
            # Each of these is a launch in every layer of a decode step. 16 bits hold all of e4m3.
            query, scale = query.to(self.hooks.dtype), float(self.layer._q_scale_float)
            if scale != 1.0:
                query = query * scale
        return query


class LayerHooks:
    """The hooks of a model's layers, and what the running pass does beside them.

    layers: the worker's with full attention, in order; by_number: the same, by their number among
    all. sliding: by name, the numbers of the decoder's other layers, if passes know of them;
    windows: their hooks, if tokens may be selected. work: for the prompts in the pass; None outside
    of one with work. scratch_bytes: what a layer's work may take for a moment. kept: what has to
    outlive vLLM's sleep. is_bound: whether vLLM has given the layers their caches; before, it runs
    them only to see how much memory they take.
    retrieval: of the server, if it retrieves; retrieval_pass: what the running pass retrieves.
    """

    def __init__(
        self,
        model: HookedModel,
        stages: Sequence[int],
        dtype: torch.dtype,
        layout: Layout,
        first: int = 0,
    ) -> None:
        """stages: the KV stage of each layer. first: the number of the worker's first one."""
        attention = model.attention_layers()
        numbers = {layer.layer_name: i for i, layer in enumerate(model.every_layer(), first)}
        # Of every layer that passes know of, and the KV groups of those, once they are formed.
        self.first = first
        self.names = [layer.layer_name for layer in model.every_layer()]
        self._groups: dict[str, int] = {}
        self.dtype = dtype
        self.work: LayerWork | None = None
        self.scratch_bytes, self.is_bound = 0, False
        self.kept: list[Tensor] = []
        self.retrieval: Retrieval | None = None
        self.retrieval_pass: RetrievalPass | None = None
        self.layers = [
            LayerHook(
                *(self, layer, place, stage, first, numbers[layer.layer_name]),
                retrieves=layout.retrieving.retrieves(first + place),
            )
            for place, (layer, stage) in enumerate(zip(attention, stages, strict=True))
        ]
        self.by_number = {hook.number: hook for hook in self.layers}
        self.sliding = {n: i for n, i in numbers.items() if i not in self.by_number}
        others = [layer for layer in model.every_layer() if layer.layer_name in self.sliding]
        self.windows = [SlidingHook(layer) for layer in others] if layout.selects else []
        self._projections = model.output_projections() if layout.value_norms else []
        self.read_weights()

    def _take_scratch(self, device: torch.device) -> None:
        """Take a layer's scratch, and give it back, beside all that a layer's attention holds.

        So vLLM's peak includes it exactly where it is above that of the rest, such as the MLP.
        """
        if self.scratch_bytes:
            torch.empty(self.scratch_bytes, dtype=torch.uint8, device=device)

    @torch.no_grad()
    def read_weights(self) -> None:
        """Factors of output projections, where the layout wants any: the weights are new."""
        for hook, projection in zip(self.layers, self._projections, strict=False):
            impl = hook.layer.impl
            found = value_factors(projection, impl.num_heads, impl.head_size, self.dtype)
            if hook.value_factors is None:
                hook.value_factors = found
            else:
                hook.value_factors.copy_(found)

    def bind(self, config: KVCacheConfig, layout: Layout) -> None:
        """vLLM has formed its KV groups, and given every layer its cache.

        Raises:
            RuntimeError: keys have to be addressed, or stored without attention, and the attention
                backend's cannot be, or its kernels split blocks.
        """
        self.is_bound = True
        groups = config.kv_cache_groups
        names = {name: group for group, spec in enumerate(groups) for name in spec.layer_names}
        self._groups = names
        addressed = layout.retain or layout.window or layout.sidecar
        for window in self.windows:
            window.check_backend()
        for hook in self.layers:
            hook.group = names[hook.layer.layer_name]
            attention: Any = hook.layer.attn_backend
            if hook.is_int8:
                assert layout.sidecar is not None
                spec = layer_spec(groups[hook.group])
                assert isinstance(spec, AttentionSpec)
                hook.layer.impl.sidecar_bytes = sidecar_bytes(spec, layout.sidecar)
            if (unusable := why_unusable(layout, attention)) is not None:
                raise RuntimeError(str(unusable))
            if not addressed:
                continue
            # Block tables are in the manager's blocks; a layer's cache is a view in the kernel's.
            size, kernel_size = groups[hook.group].kv_cache_spec.block_size, hook.block_size
            if kernel_size != size:
                raise RuntimeError(
                    f"KV blocks have {size} tokens, and attention backend "
                    f"{attention.get_name()} splits them "
                    f"into blocks of {kernel_size}, in which entries would be looked for in the "
                    f"wrong place: set --block-size {kernel_size}"
                )

    def slots(self, slots: Tensor, first: int, last: int) -> dict[str, Tensor]:
        """The slots (N,) of layers [first, last), by layer name; slots: (KV groups, N)."""
        names = self.names[first - self.first : last - self.first]
        return {name: slots[self._groups[name]] for name in names}

    def sliding_groups(self) -> dict[int, list[str]]:
        """The layers that slide, by KV group."""
        found: dict[int, list[str]] = {}
        for name in self.sliding:
            found.setdefault(self._groups[name], []).append(name)
        return found

    def run_work(self, layer: int, query: Tensor) -> None:
        """The running pass's work in a layer that does not run; query: (n, H, D)."""
        hook = self.by_number[layer]
        if self.work is not None:
            self.work.run(hook, query, hook.paged())

    def during(
        self, work: LayerWork | None, retrieval_pass: RetrievalPass | None = None
    ) -> AbstractContextManager[None]:
        """A context in which the layers do this besides; to be entered once."""
        if work is None and retrieval_pass is None:
            return nullcontext()
        return self._beside(work, retrieval_pass)

    @contextmanager
    def _beside(
        self, work: LayerWork | None, retrieval_pass: RetrievalPass | None
    ) -> Iterator[None]:
        self.work, self.retrieval_pass = work, retrieval_pass
        try:
            yield
        finally:
            self.work = self.retrieval_pass = None
