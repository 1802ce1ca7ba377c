"""Which whole blocks of a prompt stay: those with the most centrality, and the window's."""

import torch
from torch import Tensor


def top_blocks(centrality: Tensor, *, num_blocks: int, block_size: int, window: int) -> Tensor:
    """The `num_blocks` blocks of a prompt that stay; nothing waits for the device.

    Blocks that the window touches stay always, so the last and perhaps partial one stays last; the
    others are ranked by their summed centrality, and of equal ones the lower goes first.

    Args:
        centrality: (n,) float32 of the prompt's entries in the order of their slots.
        num_blocks: at least as many as the window touches.
        block_size: entries of a block.
        window: last entries of the prompt.

    Returns:
        (num_blocks,) int64 indices into the prompt's block table, ascending.
    """
    ranked = max(len(centrality) - window, 0) // block_size
    total = -(-len(centrality) // block_size)
    always = torch.arange(ranked, total, device=centrality.device)
    wanted = num_blocks - len(always)
    if wanted <= 0:
        return always
    entries = centrality[: ranked * block_size].view(ranked, block_size)
    sums = entries[:, 0].clone()
    # One by one: torch adds some columns in another order, and equal blocks must stay equal.
    for column in range(1, block_size):
        sums += entries[:, column]
    order = torch.sort(sums, descending=True, stable=True).indices
    return torch.cat([order[:wanted].sort().values, always])
