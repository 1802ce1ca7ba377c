"""What a new index needs: a class, and a row. Here one that keeps each group's mean key."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvx.equations.retrieval import num_full_groups, page_scores, select_units
from vllm_kvx.indexes.base import Index, Writer
from vllm_kvx.ops.paged import PagedKV
from vllm_kvx.ops.retrieval.attend import attend_reference
from vllm_kvx.ops.retrieval.backends import Backends
from vllm_kvx.ops.retrieval.index_layout import PageShape, keys_of_groups, page_tails
from vllm_kvx.ops.retrieval.retrieve import Scratch, retrieve
from vllm_kvx.ops.retrieval.rows import RetrievalRows
from vllm_kvx.ops.retrieval.score import scores_of_row


@dataclass(frozen=True)
class Means:
    """values: (num_blocks, G, groups of a block, D) float16."""

    shape: PageShape
    values: Tensor


class GroupMeans(Index[Means]):
    name = "group_means"

    def unit(self, group: int) -> int:
        return group

    def head_bytes(self, shape: PageShape) -> int:
        return shape.num_groups * shape.head_dim * 2

    def view(self, kv_cache: Tensor, shape: PageShape) -> Means:
        tails = page_tails(kv_cache, shape.num_kv_heads, self.head_bytes(shape))
        groups = (shape.num_groups, shape.head_dim)
        return Means(shape, tails.view(torch.float16).unflatten(2, groups))

    def writer(
        self,
        layers: Sequence[tuple[PagedKV, Means]],
        groups: Sequence[int],
        stages: Sequence[int],
    ) -> Writer:
        raise NotImplementedError

    def write_in_torch(
        self, paged: PagedKV, sidecar: Means, block_table: Tensor, begin: int, end: int
    ) -> None:
        size, per_block = sidecar.shape.group, sidecar.shape.num_groups
        keys = keys_of_groups(paged, block_table, begin, end, size)
        means = keys.unflatten(1, (-1, size)).mean(dim=2)
        group = torch.arange(begin, end)
        where = block_table[group // per_block].long(), slice(None), group % per_block
        sidecar.values[where] = means.transpose(0, 1).to(torch.float16)

    def score_in_triton(self, *args: object, **options: object) -> None:
        raise NotImplementedError

    def score_in_torch(
        self,
        query: Tensor,
        sidecar: Means,
        block_table: Tensor,
        length: int,
        reduction: str,
        scale: float,
    ) -> Tensor:
        shape = sidecar.shape
        group = torch.arange(num_full_groups(length, shape.group))
        blocks = block_table[group // shape.num_groups].long()
        means = sidecar.values[blocks, :, group % shape.num_groups].transpose(0, 1)
        # A page that is as wide as nothing: its bound is the product with its middle.
        scores = page_scores(query, torch.zeros_like(means), means)
        return scores_of_row(scores, shape.num_kv_heads, 1, reduction, scale)


def test_retrieves_by_means() -> None:
    index, shape = GroupMeans(), PageShape(num_kv_heads=2, block_size=32, head_dim=16, group=8)
    length, blocks, heads, budget = 150, 6, 4, 5
    rng = torch.Generator().manual_seed(0)
    page = 2 * 32 * 2 * 16 * 4
    stride = page + index.page_bytes(shape)
    raw = torch.full((blocks * stride,), 255, dtype=torch.uint8)
    row = 2 * 16 * 4
    cache = torch.as_strided(raw, (blocks, 2, 32, row), (stride, 32 * row, row, 1))
    cache = cache.view(torch.float32)
    cache[:] = torch.randn(cache.shape, generator=rng)
    paged, sidecar = PagedKV.of(cache, 16), index.view(cache, shape)
    table = torch.tensor([[4, 0, 3, 1, 5]], dtype=torch.int32)
    index.write_in_torch(paged, sidecar, table[0], 0, length // 8)
    query, out = torch.randn(1, heads, 16, generator=rng), torch.empty(1, heads, 16)
    one = torch.ones(1).numpy().astype(int)
    rows = RetrievalRows.of(one * 0, one * 0, one * length, one * budget, 8, torch.device("cpu"))
    scratch = Scratch.of(
        index,
        num_heads=heads,
        kv_heads=2,
        head_dim=16,
        max_rows=1,
        capacity=20,
        max_units=budget,
        unit=index.unit(8),
        reduction="max",
        device=torch.device("cpu"),
        backend="torch",
    )
    retrieve(
        query, paged, sidecar, table, rows, scratch, out, scale=0.25, key_scale=1.0, value_scale=1.0
    )
    means = paged.dense_keys(table[0], 144).unflatten(1, (-1, 8)).mean(dim=2).half().float()
    for g in range(2):
        mine = slice(g * 2, g * 2 + 2)
        scores = (query[0, mine] @ means[g].T).amax(dim=0)
        read = select_units(scores, length, 8, 8, budget * 8)
        of_head = PagedKV(paged.keys[:, g : g + 1], paged.values[:, g : g + 1])
        expected = attend_reference(query[0, mine], of_head, table[0], read, 0.25)
        torch.testing.assert_close(out[0, mine], expected)


def test_without_a_cuda_op_it_is_scored_in_triton() -> None:
    reductions = GroupMeans.cuda_reductions
    backends = Backends.of("cuda", "built", torch.bfloat16, 128, 4, "max", reductions)
    assert (backends.score, backends.attend) == ("triton", "cuda")
    assert "no CUDA op scores this index" in backends.reason
