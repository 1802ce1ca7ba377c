"""The manager of KV groups above a cut whose layers slide over a window."""

from collections.abc import Sequence
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

from vllm_kvx.cache.managers import PolicyKVCacheManager


class SlidingStageKVCacheManager(PolicyKVCacheManager, SlidingWindowManager):
    """Blocks of one such group: those of stored entries that a window still reaches.

    Nothing of it is in the prefix cache: what a window holds of a prompt is not the prompt's end
    where some of it does not exist.
    """

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        count = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model,
            apply_admission_cap,
            prefill_end,
        )
        most, kv = self.max_admission_blocks_per_request, self.requests.get(request_id)
        if not apply_admission_cap or most is None or kv is None:
            return count
        # Blocks behind the window go as others come, so that a long answer never holds all at once;
        # anchors stay until the tail comes.
        return min(count, max(most, cdiv(kv.storage.prefill.start, self.block_size)))

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        kv = self.requests.get(request_id)
        if kv is not None and kv.storage.turn is not None:
            if processed_computed_tokens <= kv.storage.turn:
                return  # What comes next takes the slots of what is there.
            processed_computed_tokens = kv.storage.stored_len(processed_computed_tokens)
        super().remove_skipped_blocks(request_id, processed_computed_tokens, num_prompt_tokens)

    @classmethod
    def find_longest_cache_hit(cls, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("groups of a policy stage take no part in prefix lookups")
