"""The slot kernel against its torch reference; under Triton's interpreter on CPU."""

import pytest
import torch

from vllm_kvx.ops.slots import map_slots, map_slots_reference

POISON = -7777


@pytest.mark.parametrize("on_host", [None, False], ids=["default", "kernel"])
@pytest.mark.parametrize("seed", range(12))
def test_matches_reference(seed: int, on_host: bool | None, device: str) -> None:
    rng = torch.Generator().manual_seed(seed)

    def randint(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    max_reqs, num_reqs, num_groups, max_tokens = 9, 5, 4, 4096
    num_reqs_padded = num_reqs + randint(0, 3)
    block_sizes = [16, 16, 32, 16]
    upper = {1: 0, 2: 1, 3: 1}  # group -> segment
    widths = [300, 300, 150, 300]
    tables = [
        torch.randint(1, 10_000, (max_reqs, w), generator=rng, dtype=torch.int32).to(device)
        for w in widths
    ]
    gap_starts = torch.randint(0, 40, (2, max_reqs), generator=rng, dtype=torch.int32)
    gap_sizes = torch.randint(0, 300, (2, max_reqs), generator=rng, dtype=torch.int32)
    gap_sizes[:, 0] = 0
    idx_mapping = torch.randperm(max_reqs, generator=rng)[:num_reqs]
    begins = [0, randint(0, 500), randint(0, 40), 1, 15]
    counts = [randint(1, 1500), 1, randint(1, 700), 1, 17]
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    positions = torch.cat([torch.arange(b, b + c) for b, c in zip(begins, counts, strict=True)])
    seq_lens = torch.tensor([b + c for b, c in zip(begins, counts, strict=True)], dtype=torch.int32)
    slots = torch.full((num_groups, max_tokens), POISON, dtype=torch.int64, device=device)
    stored = torch.full((2, max_reqs), POISON, dtype=torch.int32, device=device)

    map_slots(
        torch.tensor(list(upper), dtype=torch.int32, device=device),
        torch.tensor(list(upper.values()), dtype=torch.int32, device=device),
        idx_mapping.to(device),
        starts.to(device),
        positions.to(device),
        seq_lens.to(device),
        gap_starts.to(device),
        gap_sizes.to(device),
        torch.tensor([t.data_ptr() for t in tables], dtype=torch.uint64, device=device),
        torch.tensor(widths, dtype=torch.int64, device=device),
        torch.tensor(block_sizes, dtype=torch.int32, device=device),
        slots,
        stored,
        num_reqs_padded,
        on_host,
    )

    assert (slots[0] == POISON).all(), "a group of the first segment was rewritten"
    for group, segment in upper.items():
        for i, request in enumerate(idx_mapping.tolist()):
            expected, length = map_slots_reference(
                positions[starts[i] : starts[i + 1]],
                int(seq_lens[i]),
                int(gap_starts[segment, request]),
                int(gap_sizes[segment, request]),
                tables[group][request].cpu(),
                block_sizes[group],
            )
            assert torch.equal(slots[group, starts[i] : starts[i + 1]].cpu(), expected)
            assert int(stored[segment, i]) == length
        assert (slots[group, sum(counts) :] == POISON).all(), "wrote past the batch"
    assert (stored[:, num_reqs:num_reqs_padded] == 0).all()
    assert (stored[:, num_reqs_padded:] == POISON).all()
