"""Pages with a sidecar beside those of windows: all pages of a pool come out in one size."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.configs import kv_cache_groups, vllm_config, write_config
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from vllm_kvx.cache.kv_cache_specs import page_shape, policy_kv_cache_specs
from vllm_kvx.config.settings import KVSettings
from vllm_kvx.indexes.table import INDEXES


def layer(spec: Any) -> Any:
    return SimpleNamespace(get_kv_cache_spec=lambda vllm_config: spec)


@pytest.mark.parametrize("policy", ["fier-64", "quest-64"])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("head_size", [32, 64])
def test_windows_with_other_heads(
    tmp_path: Path, policy: str, kv_heads: int, head_size: int
) -> None:
    """vLLM makes blocks of smaller pages longer, or pads them, if they have no room already."""
    config = vllm_config(write_config(tmp_path), policy, dtype="float32", block_size=32)
    config.cache_config.kv_cache_layout = "LBHNC"  # vLLM's engine asks the backend.
    settings = KVSettings.from_vllm_config(config)
    assert settings is not None and settings.layout.sidecar is not None
    sizes: Any = dict(block_size=32, dtype=torch.float32)
    full = [layer(FullAttentionSpec(num_kv_heads=2, head_size=32, **sizes)) for _ in range(2)]
    slides = SlidingWindowSpec(
        num_kv_heads=kv_heads, head_size=head_size, sliding_window=64, **sizes
    )
    sliding = [layer(slides) for _ in range(4)]
    policy_kv_cache_specs(full, settings, len(sliding), sliding)
    specs = {f"{n}": each.get_kv_cache_spec(config) for n, each in enumerate([*full, *sliding])}
    groups = kv_cache_groups(config, specs)
    assert len({group.kv_cache_spec.page_size_bytes for group in groups}) == 1
    ours = next(group.kv_cache_spec for group in groups if "0" in group.layer_names)
    index = INDEXES[settings.layout.sidecar.index]
    room = index.page_bytes(page_shape(ours, settings.layout.sidecar))
    assert ours.page_size_bytes >= ours.unpadded_page_size_bytes + room
    assert ours.block_size % settings.layout.sidecar.group == 0
