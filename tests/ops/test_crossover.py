"""From which length on `dense_below=auto` retrieves."""

import pytest

from vllm_kvx.ops.retrieval.backends import BACKENDS
from vllm_kvx.ops.retrieval.crossover import CROSSOVERS, NEVER, crossover
from vllm_kvx.policy.methods.fier import FIER
from vllm_kvx.policy.parameters import MAX_DIGITS

MEASURED = {(2, 256): 60_000, (2, 512): 50_000, (4, 512): 30_000, (8, 512): 16_000}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CROSSOVERS, "cuda", MEASURED)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("kv_heads", "head_bytes", "expected"),
    [
        (8, 512, 16_000),
        (2, 512, 50_000),
        (16, 1024, 16_000),  # more of both than any row
        (5, 512, 30_000),  # KV heads between two rows
        (8, 256, 60_000),  # an fp8 cache: no row of more heads has so few bytes
        (1, 512, 60_000),  # as many bytes as the smallest row, which has more heads
        (1, 256, 120_000),  # half of its bytes
        (1, 100, 300_000),
    ],
)
def test_the_nearest_row_that_is_no_larger(kv_heads: int, head_bytes: int, expected: int) -> None:
    assert crossover("cuda", "max", kv_heads, head_bytes) == expected


def test_what_was_measured() -> None:
    """Fewer KV heads or bytes never cross over earlier: unmeasured shapes rely on it."""
    assert set(CROSSOVERS) == set(BACKENDS)
    for table in CROSSOVERS.values():
        for (heads, size), entries in table.items():
            larger = [n for (h, b), n in table.items() if h >= heads and b >= size]
            assert 0 < max(larger) == entries < NEVER


def test_never_and_always() -> None:
    assert crossover("triton", "softmax", 8, 512) == NEVER
    assert crossover("torch", "softmax", 1, 64) == 0
    assert crossover("triton", "max", 1, 1) <= NEVER
    assert 10**MAX_DIGITS < NEVER < 1 << 31


def test_floors() -> None:
    """No length of an int32 reaches the one that never comes."""
    assert FIER(64).floor(NEVER) == NEVER and FIER(64).floor(0) == 65
    assert FIER(64, dense_below=0).floor(NEVER) == 65
    assert [FIER(n).floor(16384) for n in (64, 4096, 8192)] == [16384, 16384, 32768]
