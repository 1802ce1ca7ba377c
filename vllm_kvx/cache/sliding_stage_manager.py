"""The manager of KV groups above a cut whose layers slide over a window."""

from collections.abc import Sequence

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.request import Request

from vllm_kvx.cache.managers import PolicyKVCacheManager


class SlidingStageKVCacheManager(PolicyKVCacheManager, SlidingWindowManager):
    """Blocks of one such group: those of stored entries that a window still reaches.

    A request that computes all of its prompt here has it in the prefix cache as under stock vLLM.
    Of one that does not, nothing is: what its window holds is not the prompt's end.
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

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        kv = self.requests.get(request_id)
        if kv is not None and kv.storage.turn is not None:
            # The tail takes the first slots, and sees nothing of the prefix. So there is nothing to
            # bring, and no block that the window has passed.
            num_local_computed_tokens = num_external_computed_tokens = 0
        super().add_local_computed_blocks(
            request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
        )

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Publishes those that a prompt may go on from, as stock vLLM does of a window."""
        kv = self.requests.get(request.request_id)
        if kv is None:
            return
        if kv.publishes is not None:
            num_tokens = min(num_tokens, kv.publishes)
        # Past the base class, which publishes every block.
        SlidingWindowManager.cache_blocks(
            self,
            request,
            num_tokens,
            retention_interval,
            replay_boundaries=(*replay_boundaries, *kv.resumes),
        )

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
