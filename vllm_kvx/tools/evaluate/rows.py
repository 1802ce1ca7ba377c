"""Rows of a report: a policy over a KV cache, on the model or on the one that it was tuned from."""

from dataclasses import dataclass, replace

from vllm_kvx.policy.cache_dtype import FULL, dtype_name, split_dtype

_ORIGINAL = " (original)"


@dataclass(frozen=True)
class Row:
    """What answers are asked and compared under; `str` writes it, as in `fier-512@fp8 (original)`.

    policy: as the user names it, without a KV cache dtype. cache_dtype: the KV cache dtype that the
    row names; None where the engine's other options decide. on_original: whether the original is
    asked, from which the model was tuned.
    """

    policy: str
    cache_dtype: str | None = None
    on_original: bool = False

    @classmethod
    def parse(cls, text: str) -> "Row":
        """The row that `str` writes as `text`."""
        name = text.removesuffix(_ORIGINAL)
        return cls(*split_dtype(name), name != text)

    def __str__(self) -> str:
        dtype = f"@{self.cache_dtype}" if self.cache_dtype else ""
        return f"{self.policy}{dtype}{_ORIGINAL if self.on_original else ''}"

    @property
    def is_full(self) -> bool:
        """Whether it is `full` and names no KV cache dtype, on either model."""
        return self.policy == FULL and self.cache_dtype is None

    def of_original(self) -> "Row":
        """The same on the original."""
        return replace(self, on_original=True)

    def over(self, dtype: str | None) -> "Row":
        """The row over an engine's KV cache, which it names if it named none.

        Dtypes that lose nothing stay without a name.
        """
        return replace(self, cache_dtype=self.cache_dtype or dtype_name(dtype) or None)


FULL_ROW = Row(FULL)
FULL_ORIGINAL = FULL_ROW.of_original()
