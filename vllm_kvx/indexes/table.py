"""Every index. A new one is its file and a row here."""

from vllm_kvx.indexes.base import AnyIndex
from vllm_kvx.indexes.one_bit import OneBit
from vllm_kvx.indexes.page_bounds import PageBounds

_TABLE: tuple[AnyIndex, ...] = (OneBit(), PageBounds())
INDEXES: dict[str, AnyIndex] = {index.name: index for index in _TABLE}
