"""Hidden states of prompts between their chunks: the stash of token-selective propagation."""

import numpy as np
import torch

from vllm_kvx.policy.storage import STASH_PAGE, stash_pages


class Stash:
    """States of every prompt token before the layers that selected tokens run, until they do.

    They begin above the layer that selects, or with it where it is split (``worker/split_layers``).

    The window's queries, which select, exist only in a prompt's last chunk, so earlier chunks'
    states wait here. Allocated once, before vLLM measures memory; the scheduler admits only what
    fits, so taking pages cannot fail.

    Attributes:
        states: (pages * STASH_PAGE, hidden) model dtype, the sum of hidden states and residual:
            all that the next layer reads.
    """

    def __init__(
        self, num_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        num_pages = stash_pages(num_tokens)
        self.states = torch.empty(num_pages * STASH_PAGE, hidden_size, dtype=dtype, device=device)
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_pages = num_pages
        self._pages: dict[str, np.ndarray] = {}

    def take(self, req_id: str, prompt_len: int) -> None:
        """Gives a prompt its pages, unless it has them.

        Raises:
            RuntimeError: there are too few, which the scheduler should have prevented.
        """
        if req_id in self._pages:
            return
        needed = stash_pages(prompt_len)
        if needed > len(self._free):
            raise RuntimeError(f"stash pages: {needed} needed, {len(self._free)} free")
        self._pages[req_id] = np.array([self._free.pop() for _ in range(needed)], dtype=np.int64)

    def release(self, req_id: str) -> None:
        """Takes a prompt's pages back; none is fine. Steps already queued still read them."""
        pages = self._pages.pop(req_id, None)
        if pages is not None:
            self._free.extend(reversed(pages.tolist()))

    def rows(self, req_id: str, begin: int, end: int) -> np.ndarray:
        """(end - begin,) int64 rows of ``states`` that hold positions [begin, end)."""
        positions = np.arange(begin, end)
        return self._pages[req_id][positions // STASH_PAGE] * STASH_PAGE + positions % STASH_PAGE

    def pages(self, req_id: str) -> np.ndarray:
        """(P,) int64 page numbers of a prompt, in the order of its positions."""
        return self._pages[req_id]

    @property
    def used_tokens(self) -> int:
        """Tokens' worth of pages that are taken."""
        return (self._num_pages - len(self._free)) * STASH_PAGE
