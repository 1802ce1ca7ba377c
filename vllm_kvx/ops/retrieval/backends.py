"""Which ops of retrieval run, CUDA, Triton or torch, and from which length on that pays."""

import os
from dataclasses import dataclass

import torch

from vllm_kvx.ops.retrieval import cuda as cuda_ops

# More entries than any request has; lengths on the device are int32, and so is this.
NEVER = 1 << 30
# Entries from which on a step is faster than with stock attention, by what scores and selects, for
# one request of Llama-3.1-8B's shape on an H200 (benchmarks/results/h200-fier.json, and for Triton
# h200-retrieval-ops.json). On CPU nothing is gained, and everything can be tried.
CROSSOVER = {"cuda": 16384, "triton": 262_144, "torch": 0}
# Bytes that an entry of a layer's cache had there: 8 KV heads, 128 channels, 16 bits.
_ENTRY_BYTES = 4096
BACKENDS = ("cuda", "triton", "torch")
BACKEND_VARIABLE = "KVX_RETRIEVAL_OPS"


def choose_backend(device: torch.device) -> tuple[str, str]:
    """Which ops run on `device`, one of BACKENDS, and why.

    Raises:
        ValueError: ``KVX_RETRIEVAL_OPS`` asks for what there is not.
    """
    wanted = os.environ.get(BACKEND_VARIABLE, "")
    if wanted not in ("", *BACKENDS):
        raise ValueError(f"{BACKEND_VARIABLE} must be one of {', '.join(BACKENDS)}, got {wanted!r}")
    if wanted == "torch" and device.type != "cpu":
        raise ValueError(f"{BACKEND_VARIABLE}=torch is for CPUs: unset it")
    if wanted in ("triton", "torch"):
        return wanted, f"{BACKEND_VARIABLE} is set"
    if device.type == "cpu":
        if wanted:
            raise ValueError(f"{BACKEND_VARIABLE}=cuda needs a GPU: unset it")
        return "torch", "the device is a CPU"
    reason = cuda_ops.why_not()
    if not reason:
        return "cuda", f"{cuda_ops.LIBRARY.name} is built for this GPU"
    if wanted:
        raise ValueError(f"{BACKEND_VARIABLE}=cuda: {reason}")
    return "triton", reason


@dataclass(frozen=True)
class Backends:
    """Which ops run, each one of BACKENDS.

    score: also of selection, which in CUDA reads what the CUDA scores leave. attend: of attention.
    reason: why these.
    crossover: entries from which on retrieval pays; NEVER if at no length.
    """

    score: str
    attend: str
    reason: str
    crossover: int

    @classmethod
    def of(
        cls,
        backend: str,
        reason: str,
        dtype: torch.dtype,
        head_dim: int,
        share: int,
        reduction: str,
    ) -> "Backends":
        """`backend`, and Triton's ops where there are no CUDA ones.

        dtype: of queries. share: query heads per KV head. reduction: see ``equations.retrieval``.
        """
        score = attend = backend
        if backend == "cuda":
            if refusal := cuda_ops.why_not_for(dtype, head_dim, share):
                score = attend = "triton"
                reason = refusal
            elif reduction not in cuda_ops.REDUCTIONS:
                score = "triton"
                known = " or ".join(cuda_ops.REDUCTIONS)
                reason = f"CUDA ops want reduction={known}, not {reduction}"
        # Two passes, each of which takes as long as a score of one: for one request the two alone
        # take longer than stock attention at every length measured (h200-retrieval-ops.json).
        twice = score == "triton" and reduction == "softmax"
        return cls(score, attend, reason, NEVER if twice else CROSSOVER[score])

    def crossover_for(self, entry_bytes: int) -> int:
        """The crossover where stock attention reads `entry_bytes` per entry of a layer.

        Of smaller entries more take it as long: of an fp8 cache, of one rank of several. What
        retrieval takes is mostly latency, and is thought of as the same.
        """
        return min(self.crossover * max(_ENTRY_BYTES // entry_bytes, 1), NEVER)

    def __str__(self) -> str:
        if self.score == self.attend:
            return self.score
        return f"score and select: {self.score}, attend: {self.attend}"
