"""Which ops of retrieval run, CUDA, Triton or torch, and from which length on that pays."""

import os
from collections.abc import Collection
from dataclasses import dataclass

import torch

from vllm_kvx.ops.retrieval import cuda as cuda_ops

# More entries than any request has; lengths on the device are int32, and so is this.
NEVER = 1 << 30
# Entries from which on a step is faster than with stock attention, by the backend that scores and
# selects. Measured for one request of Llama-3.1-8B's shape on an H200
# (benchmarks/results/h200-fier.json, for Triton h200-retrieval-ops.json). On a CPU retrieval gains
# nothing, and every length may try it.
CROSSOVER = {"cuda": 16384, "triton": 262_144, "torch": 0}
# Bytes of an entry of a layer's cache in those measurements: 8 KV heads, 128 channels, 16 bits.
_ENTRY_BYTES = 4096
BACKENDS = ("cuda", "triton", "torch")
BACKEND_VARIABLE = "KVX_RETRIEVAL_OPS"


def choose_backend(device: torch.device) -> tuple[str, str]:
    """Which ops run on `device`, one of BACKENDS, and why.

    Raises:
        ValueError: ``KVX_RETRIEVAL_OPS`` names no backend, or one that cannot run on `device`.
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

    score: scores and selects; selection in CUDA reads what scoring in CUDA leaves.
    attend: attends to what is selected.
    reason: why these were chosen.
    crossover: entries from which on retrieval pays; NEVER if it pays at no length.
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
        cuda_reductions: Collection[str] = tuple(cuda_ops.REDUCTIONS),
    ) -> "Backends":
        """The ops of `backend`, and Triton's where there is no CUDA op.

        dtype: of queries. share: query heads per KV head. reduction: see ``equations.retrieval``.
        cuda_reductions: those that the index's CUDA op knows; none if the index has no CUDA op.
        """
        score = attend = backend
        if backend == "cuda":
            if refusal := cuda_ops.why_not_for(dtype, head_dim, share):
                score = attend = "triton"
                reason = refusal
            elif not cuda_reductions:
                score = "triton"
                reason = "no CUDA op scores this index"
            elif reduction not in cuda_reductions:
                score = "triton"
                known = " or ".join(cuda_reductions)
                reason = f"CUDA ops want reduction={known}, not {reduction}"
        # Softmax in Triton takes two passes over the units: for one request they alone take longer
        # than stock attention at every length measured (h200-retrieval-ops.json).
        twice = score == "triton" and reduction == "softmax"
        return cls(score, attend, reason, NEVER if twice else CROSSOVER[score])

    def crossover_for(self, entry_bytes: int) -> int:
        """The crossover where stock attention reads `entry_bytes` per entry of a layer.

        Stock attention reads more entries in the same time where they are smaller: in an fp8 cache,
        on one rank of several. Retrieval's time is mostly latency and is taken to be the same.
        """
        return min(self.crossover * max(_ENTRY_BYTES // entry_bytes, 1), NEVER)

    def __str__(self) -> str:
        if self.score == self.attend:
            return self.score
        return f"score and select: {self.score}, attend: {self.attend}"
