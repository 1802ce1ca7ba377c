"""CUDA operators of retrieval far into a large cache of a layer. Skipped without so much memory.

Where policies cut a model's layers at several places, vLLM's pool is one tensor for a layer of
each group: up to all of it, 110 GiB of an H200.
"""

from collections.abc import Iterator

import pytest
import torch

from vllm_kvx.ops.retrieval import cuda as cuda_ops
from vllm_kvx.ops.retrieval.one_launch import CAPABILITY

from .retrieval_cases import (
    BF16,
    E4M3,
    INT8,
    LENGTHS,
    Attention,
    Scores,
    any_units,
    check_attention,
    check_scores,
    make_case,
    run_attend,
    run_score,
)
from .test_one_launch_cuda import check

# More than 2^32 units of 16 bytes.
FAR = 68 << 30

pytestmark = pytest.mark.skipif(bool(cuda_ops.why_not()), reason=cuda_ops.why_not())


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    """Asked for when a test runs: other processes' tests take memory, too."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < FAR + (4 << 30):
        pytest.skip(f"needs {(FAR >> 30) + 4} GiB of GPU memory")
    yield
    torch.cuda.empty_cache()


def test_far_blocks() -> None:
    """One after the other, as two such caches have no room."""
    for cache_dtype in (BF16, E4M3, INT8):
        for head_dim in (64, 128, 256):
            case = make_case(LENGTHS, head_dim=head_dim, cache_dtype=cache_dtype, first_byte=FAR)
            block_bytes = case.paged.keys.stride(0) * cache_dtype.itemsize
            assert int(case.table(0)[0]) * block_bytes >= FAR
            scores = Scores.of(LENGTHS, case.num_kv_heads)
            run_score(case, scores, "max", 264)
            check_scores(case, scores, "max", pages=False)
            indices, counts = any_units(case, 1)
            got = Attention.of(case, 16)
            run_attend(case, indices, counts, 1, 16, got)
            check_attention(case, indices, counts, 1, got)
            del case
            torch.cuda.empty_cache()


def test_far_blocks_in_one_launch() -> None:
    if torch.cuda.get_device_capability() != CAPABILITY:
        pytest.skip("there is no such launch")
    check(make_case([40_001, 0, 5000, 65], kv_heads=4, first_byte=FAR), 512)
