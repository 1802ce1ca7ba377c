"""Layers of models that people serve, as a rank has them, for what is timed in a step."""

from dataclasses import dataclass

from benchmarks.ops.retrieval_layer import LLAMA_8B, LLAMA_8B_OF_2, QWEN3_NEXT, Heads


@dataclass(frozen=True)
class LayerShape:
    """Attention's heads, and what the rest of a layer has.

    Attributes:
        hidden: of the states. intermediate: of a rank's MLP, or of the experts that one token asks
            taken together; 0 where the rest of a layer is something else.
    """

    heads: Heads
    hidden: int = 0
    intermediate: int = 0


SHAPES = {
    "llama-3.1-8b": LayerShape(LLAMA_8B, 4096, 14336),
    "llama-3.1-8b-of-2": LayerShape(LLAMA_8B_OF_2, 4096, 7168),
    "llama-3.1-70b-of-2": LayerShape(Heads(32, 4, 128), 8192, 14336),
    "llama-3.1-70b-of-4": LayerShape(Heads(16, 2, 128), 8192, 7168),
    "llama-3.2-1b": LayerShape(Heads(32, 8, 64), 2048, 8192),
    "qwen2.5-0.5b": LayerShape(Heads(14, 2, 64), 896, 4864),
    "qwen2.5-1.5b": LayerShape(Heads(12, 2, 128), 1536, 8960),
    "qwen2.5-7b": LayerShape(Heads(28, 4, 128), 3584, 18944),
    "qwen2.5-14b": LayerShape(Heads(40, 8, 128), 5120, 13824),
    "qwen3-32b": LayerShape(Heads(64, 8, 128), 5120, 25600),
    "qwen3-30b-a3b": LayerShape(Heads(32, 4, 128), 2048, 6144),
    "gpt-oss-20b": LayerShape(Heads(64, 8, 64), 2880, 11520),
    "gemma3-12b": LayerShape(Heads(16, 8, 256), 3840, 15360),
    "qwen3-next": LayerShape(QWEN3_NEXT),
}
