"""What a policy gains over `full` for a workload, by counting FLOPs, bytes and KV entries.

The counts are bounds: kernels reach a part of them, and of a policy a smaller part than of stock.
``docs/results/report.md`` shows how much was reached where it was measured.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vllm_kvx.errors import ToolError
from vllm_kvx.policy.axes import Method
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.tools.ideal.devices import DEVICES, Device, device_of
from vllm_kvx.tools.ideal.shape import Shape
from vllm_kvx.tools.ideal.work import (
    Work,
    batch_of,
    decode_bytes,
    full_work,
    least_time,
    prefill_flops,
    with_windows,
    work_in,
)
from vllm_kvx.tools.recommend.defaults import DEVICE

# What vLLM takes of a GPU's memory by default, and the most of it that weights may take of a card.
_MEMORY_SHARE, _WEIGHTS_SHARE = 0.92, 0.8


@dataclass(frozen=True)
class Workload:
    """Requests with `input` tokens of prompt and `output` of answer, `concurrency` at a time."""

    input: int
    output: int
    concurrency: int

    def __str__(self) -> str:
        return (
            f"{self.input:,} tokens in, {self.output:,} out, {self.concurrency} request"
            f"{'s' * (self.concurrency > 1)} at a time"
        )


@dataclass(frozen=True)
class Gains:
    """Factors over `full`; more is better.

    ttft: of the time to the first token of one prompt. tpot: of the time of a decode step of as
    many requests as run at a time. pool: prompt tokens that a KV pool holds. requests: requests per
    second where as many as the workload says, or the pool holds, run all the time.
    """

    ttft: float
    tpot: float
    pool: float
    requests: float

    def as_json(self) -> dict[str, float]:
        """By name, as a record has them."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Server:
    """What gains are counted for.

    cards: how many of the device share the weights. assumed: whether nobody named the device.
    weight_bytes, kv_bytes: of an element of the weights, and of a cached value.
    """

    shape: Shape
    device: Device
    cards: int
    assumed: bool
    weight_bytes: float = 2
    kv_bytes: float = 2

    @property
    def says(self) -> str:
        """The device in words."""
        cards = f"{self.cards} x {self.device.name}" if self.cards > 1 else self.device.name
        why = f", which is assumed: --device names another ({', '.join(DEVICES)})"
        return cards + (why if self.assumed else "")

    @property
    def pool(self) -> float:
        """Entries of all layers that the KV pool holds."""
        weights = self.shape.all_read(math.inf) + self.shape.head_weights
        free = self.cards * self.device.memory * _MEMORY_SHARE - weights * self.weight_bytes
        return free / (2 * self.shape.kv_heads * self.shape.head_dim * self.kv_bytes)


def server_of(
    config: Mapping[str, Any],
    named: str | None,
    here: str | None,
    weight_bytes: float = 2,
    kv_bytes: float = 2,
) -> Server:
    """The server that gains are counted for.

    config: the text model's, as config.json has it. named: a key of `DEVICES`; None for the GPU
    that is here, by torch's name, or without one for an H100.

    Raises:
        ToolError: the configuration lacks what is counted by, or the GPU here has no data sheet.
    """
    try:
        shape = Shape.from_config(dict(config))
    except (KeyError, TypeError) as error:
        raise ToolError(
            f"gains cannot be counted: the model's configuration has no {error.args[0]}"
        ) from error
    device = DEVICES[named] if named else device_of(here) if here else DEVICES[DEVICE]
    if device is None:
        raise ToolError(
            f"there is no data sheet of {here} here: name the GPU that gains are to be counted for "
            f"with --device ({', '.join(DEVICES)})"
        )
    weights = (shape.all_read(math.inf) + shape.head_weights) * weight_bytes
    cards = 1
    while weights > cards * device.memory * _WEIGHTS_SHARE:
        cards *= 2
    return Server(shape, device, cards, named is None and here is None, weight_bytes, kv_bytes)


def gains_of(policy: str, workload: Workload, server: Server) -> Gains | None:
    """What a policy gains; None where its name leaves a layer to measurement.

    With `after=n` the first n tokens of an answer read all entries that were computed, or what
    retrieval beside it chooses of them, and the pool holds all of them until then: on average a
    request takes that much more of it. With
    `lookahead=n` a prompt is read n times more before the first token, beside nothing else.
    """
    shape, length, output = server.shape, workload.input, workload.output
    work = work_in(shape, policy, length)
    if work is None:
        return None
    full = with_windows(full_work(shape.full_layers, length), shape, length)
    parsed, kv = parse_policy(policy), server.kv_bytes
    waits, meanwhile = min(parsed.num_generated, output), full
    if waits:
        waiting_work = work_in(shape, str(_retaining_all(parsed)), length)
        assert waiting_work is not None
        meanwhile = waiting_work

    def seconds_of(each: Work, batch: int, generated: float = 0) -> float:
        """Of a decode step."""
        read = decode_bytes(shape, each, batch, generated, server.weight_bytes, kv)
        return read / server.device.bandwidth

    batch = int(batch_of(shape, full, output, server.pool, workload.concurrency))
    whole, early, steps = (seconds_of(each, batch, output / 2) for each in (full, meanwhile, work))
    prompts = [prefill_flops(shape, each, kv) / server.device.flops for each in (full, work)]
    drafts = parsed.num_drafted(length) * seconds_of(full, 1)
    stored = [sum(each.stored) for each in (full, work)]
    held = stored[1] + waits / output * (sum(meanwhile.stored) - stored[1])
    pool = server.pool
    requests = [
        least_time(
            *(shape, each, output, server.device, entries, workload.concurrency),
            weight_bytes=server.weight_bytes,
            kv_bytes=kv,
        )
        for each, entries in ((full, pool), (work, pool * stored[1] / held))
    ]
    waiting = waits * (seconds_of(meanwhile, 1) - seconds_of(work, 1))
    return Gains(
        ttft=prompts[0] / (prompts[1] + drafts),
        tpot=whole * output / (waits * early + (output - waits) * steps),
        pool=stored[0] / held,
        requests=requests[0] / (requests[1] + waiting + drafts),
    )


def _retaining_all(policy: KVPolicy) -> KVPolicy:
    """What a policy propagates and retrieves, with all that is computed retained."""
    parts: list[Method] = [] if policy.retrieve is None else [policy.retrieve]
    if (part := policy.propagate) is not None:
        if "retain" in part.axes:
            given = {key: value for key, value in part.parameters().items() if key != "kv_budget"}
            part = type(part)(**{**given, "kv_rate": 1.0})
        parts.append(part)
    return KVPolicy.of(parts)
