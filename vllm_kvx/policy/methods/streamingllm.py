"""StreamingLLM: the static answer to what stays."""

from dataclasses import dataclass
from typing import ClassVar

from vllm_kvx.policy.axes import Positions, Retain
from vllm_kvx.policy.parameters import integer


@dataclass(frozen=True)
class StreamingLLM(Retain):
    """StreamingLLM: keep the prompt's first and last entries (Xiao et al., arXiv 2309.17453).

    sinks: first prompt tokens whose entries stay in every layer (default 4).
    recent: last prompt tokens whose entries stay in every layer (default 1020).
    """

    name: ClassVar[str] = "streamingllm"

    sinks: int = integer(4)
    recent: int = integer(1020)

    @property
    def keeps_by(self) -> Positions:
        return Positions(self.sinks)

    def kept(self, prompt_len: int, rows: int, layer: int, block_size: int, num_layers: int) -> int:
        return min(self.sinks + self.recent, rows)
