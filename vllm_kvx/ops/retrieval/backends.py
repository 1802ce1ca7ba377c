"""Which ops of retrieval run: CUDA, Triton or torch."""

import os
from collections.abc import Collection
from dataclasses import dataclass

import torch

from vllm_kvx.ops.retrieval import cuda as cuda_ops

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
        return "cuda", f"{cuda_ops.loaded()} is built for this GPU"
    if wanted:
        raise ValueError(f"{BACKEND_VARIABLE}=cuda: {reason}")
    return "triton", reason


@dataclass(frozen=True)
class Backends:
    """Which ops run, each one of BACKENDS.

    score: scores and selects; selection in CUDA reads what scoring in CUDA leaves.
    attend: attends to what is selected.
    reason: why these were chosen.
    """

    score: str
    attend: str
    reason: str

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
        return cls(score, attend, reason)

    def __str__(self) -> str:
        if self.score == self.attend:
            return self.score
        return f"score and select: {self.score}, attend: {self.attend}"
