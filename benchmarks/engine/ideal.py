"""What is measured, and what a policy could gain in it at best: see ``vllm_kvx.tools.ideal``."""

import re
from dataclasses import dataclass

from vllm_kvx.tools.ideal.shape import Shape
from vllm_kvx.tools.ideal.work import Bytes, decode_ratio, prefill_ratio

KINDS = ("ttft", "tpot", "itl", "pool_decode", "decode")
_CASE = re.compile(r"(?P<kind>[a-z_]+):((?P<batch>\d+)x)?(?P<length>\d+)(@(?P<policy>.+))?")


@dataclass(frozen=True)
class Case:
    """One measurement: `ttft:N`, `tpot:N`, `itl:N`, `pool_decode:N` or `decode:BxN`, `@policy`.

    policy: what the requests ask for themselves; None leaves them to the engine's policy.
    """

    kind: str
    length: int
    batch: int | None = None
    policy: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Case":
        match = _CASE.fullmatch(text)
        if match is None or match["kind"] not in KINDS:
            raise ValueError(f"{text!r}: write one of {', '.join(KINDS)}, a colon and a length")
        if (match["kind"] == "decode") != (match["batch"] is not None):
            raise ValueError(f"{text!r}: decode, and only decode, takes a batch: decode:16x32768")
        batch = int(match["batch"]) if match["batch"] else None
        return cls(match["kind"], int(match["length"]), batch, match["policy"])

    @property
    def stock(self) -> "Case":
        """The same measurement without a policy."""
        return Case(self.kind, self.length, self.batch)

    def __str__(self) -> str:
        batch = f"{self.batch}x" if self.batch else ""
        return f"{self.kind}:{batch}{self.length}" + (f"@{self.policy}" if self.policy else "")


def case_ratio(
    shape: Shape,
    case: Case,
    policy: str | None,
    batch: int = 1,
    stock_batch: int | None = None,
    stock_kv_bytes: Bytes | None = None,
    kv_bytes: Bytes = 2,
    **options: float,
) -> float | None:
    """The ideal gain of `policy` over stock in one case; `options` go to `decode_bytes`.

    None for `itl`, a worst case that policies may only keep within bounds.
    """
    if case.kind == "itl":
        return None
    if case.kind == "ttft":
        return prefill_ratio(shape, policy, case.length, kv_bytes, stock_kv_bytes)
    return decode_ratio(
        shape,
        policy,
        case.length,
        batch,
        stock_batch,
        stock_kv_bytes,
        kv_bytes=kv_bytes,
        **options,
    )
