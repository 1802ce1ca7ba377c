"""Which attention backend vLLM takes on GPUs that are not there, by its own code of CUDA."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import platforms
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_kvx.policy.layout import Layout, layout_of
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.worker.attention_backend import choosing_usable, why_unusable

LAYERS = 8
HOPPER, BLACKWELL = (9, 0), (10, 0)


class FlashInfer(FlashAttentionBackend):
    """In the place of vLLM's, which needs a package of its own."""

    @staticmethod
    def get_name() -> str:
        return "FLASHINFER"

    @classmethod
    def validate_configuration(cls, *_: Any, **__: Any) -> list[str]:
        return []


class Unknown(FlashInfer):
    """A backend that vllm-kvx has never heard of."""

    @staticmethod
    def get_name() -> str:
        return "UNKNOWN"


# What takes a backend's place; None for one that cannot run.
InPlace = dict[str, type[AttentionBackend] | None]
Select = Callable[..., str]


@pytest.fixture
def select(monkeypatch: pytest.MonkeyPatch) -> Iterator[Select]:
    """The name of what vLLM chooses for one layer on a device of this capability."""
    assert platforms.current_platform is not None  # Or the stand-in would make it CUDA.
    # Without CUDA its extension is not there to import, and nobody calls it here.
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("stand_in"))
    from vllm.platforms import cuda

    stock = cuda._get_attn_backend_class

    def select(
        capability: tuple[int, int],
        asked: str | None = None,
        in_place: InPlace | None = None,
        **options: Any,
    ) -> str:
        stand_ins: InPlace = {"FLASHINFER": FlashInfer, **(in_place or {})}

        def backend_class(backend: AttentionBackendEnum) -> type[AttentionBackend]:
            found = stand_ins[backend.name] if backend.name in stand_ins else stock(backend)
            if found is None:
                raise ImportError("not installed")
            return found

        class Device(cuda.CudaPlatformBase):
            @classmethod
            def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
                return DeviceCapability(*capability)

        monkeypatch.setattr(cuda, "_get_attn_backend_class", backend_class)
        monkeypatch.setattr(platforms, "_current_platform", Device())
        layout: Layout | None = options.pop("layout", None)
        config = SimpleNamespace(
            cache_config=SimpleNamespace(user_specified_block_size=False, cache_dtype="auto"),
            kv_transfer_config=None,
            speculative_config=None,
            model_config=None,
            parallel_config=SimpleNamespace(
                prefill_context_parallel_size=1, decode_context_parallel_size=1
            ),
            attention_config=SimpleNamespace(
                backend=None if asked is None else AttentionBackendEnum[asked],
                backend_per_kind={},
                use_non_causal=False,
            ),
        )
        monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: config)
        layer: dict[str, Any] = dict(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto")
        layer |= options
        if layout is None:
            return selector.get_attn_backend(**layer).get_name()
        with choosing_usable(layout):
            return selector.get_attn_backend(**layer).get_name()

    yield select
    selector._cached_get_attn_backend.cache_clear()


def layout(*policies: str) -> Layout:
    return layout_of([parse_policy(policy) for policy in policies], LAYERS)


@pytest.mark.parametrize(
    ("policies", "takes"),
    [
        (["snapkv"], "FLASHINFER"),
        (["speed-4"], "FLASHINFER"),
        (["fier-64"], "FLASH_ATTN"),
        (["snapkv", "quest-64"], "FLASH_ATTN"),
        (["fastkv:tsp_layer=3"], "FLASH_ATTN"),
        (["speed-4", "snapkv"], "FLASH_ATTN"),
    ],
)
def test_on_blackwell(select: Select, policies: Sequence[str], takes: str) -> None:
    """FlashInfer is vLLM's choice there, and stays where policies can use it."""
    assert select(BLACKWELL, layout=layout(*policies)) == takes
    assert select(BLACKWELL) == "FLASHINFER", "of an engine without a policy"
    assert select(HOPPER, layout=layout(*policies)) == "FLASH_ATTN"


def test_what_was_asked_for_is_left(select: Select) -> None:
    fier = layout("fier-64")
    assert select(BLACKWELL, "FLASHINFER", layout=fier) == "FLASHINFER"
    assert select(BLACKWELL, "TRITON_ATTN", layout=fier) == "TRITON_ATTN"


def test_the_first_that_suits(select: Select) -> None:
    fier, flash = layout("fier-64"), {"FLASH_ATTN": None}
    assert select(BLACKWELL, layout=fier, in_place=flash) == "TRITON_ATTN"
    # vLLM's own choice is one that no policy knows.
    snapkv, unknown = layout("snapkv"), {"FLASHINFER": Unknown}
    assert select(BLACKWELL, layout=snapkv, in_place=unknown) == "FLASH_ATTN"
    assert select(BLACKWELL, layout=layout("speed-4"), in_place=unknown) == "UNKNOWN"


def test_where_nothing_suits(select: Select) -> None:
    """Then vLLM's choice stays, which the layers refuse."""
    gone: InPlace = {"FLASH_ATTN": None, "TRITON_ATTN": None}
    assert select(BLACKWELL, layout=layout("fier-64"), in_place=gone) == "FLASHINFER"
    unusable = why_unusable(layout("fier-64"), FlashInfer)
    assert unusable is not None and "no room for retrieval's sidecar" in str(unusable)


def test_it_is_said_once(select: Select, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_kvx.worker import attention_backend

    lines: list[str] = []
    logger = SimpleNamespace(info_once=lambda text, *args: lines.append(text % args))
    monkeypatch.setattr(attention_backend, "logger", logger)
    select(BLACKWELL, layout=layout("snapkv"))
    select(HOPPER, layout=layout("fier-64"))
    assert not lines
    select(BLACKWELL, layout=layout("fier-64"))
    (line,) = lines
    assert line == (
        "Attention backend FLASH_ATTN takes the place of FLASHINFER, vLLM's choice here: the pages "
        "of attention backend FLASHINFER have no room for retrieval's sidecar."
    )


def test_afterwards_vllm_chooses_as_before() -> None:
    platform = platforms.current_platform
    before = dict(vars(platform))
    with choosing_usable(layout("fier-64")):
        assert dict(vars(platform)) != before
    assert dict(vars(platform)) == before


def test_int8_entries_have_one_of_our_own(select: Select, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = dict(layout=layout("fier-64"), kv_cache_dtype="int8_per_token_head")
    stock = fa_utils.get_flash_attn_version

    def has(version: int | None) -> None:
        found = wraps(stock)(lambda: version)
        monkeypatch.setattr(fa_utils, "get_flash_attn_version", found)

    has(3)
    assert select(HOPPER, **asked) == select(BLACKWELL, **asked) == "CUSTOM"
    with pytest.raises(ValueError, match=r"compute capability not supp.*: set another --kv-cache"):
        select((7, 5), **asked)
    # Nothing else reads prompts fast enough, but for float32, which it does not take.
    has(None)
    assert select(HOPPER, **asked, dtype=torch.float32) == "CUSTOM"
    with pytest.raises(ValueError, match=r"lacks FlashAttention.*: set another --kv-cache"):
        select(HOPPER, **asked)
