"""What GPUs can do at best, by their data sheets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A GPU.

    name: what users call it. flops: of dense products in 16 bits, per second. bandwidth: of its
    memory, in bytes per second. memory: in bytes. called: in what torch calls it.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    called: str


# NVIDIA's data sheets: dense bfloat16, without sparsity; the SXM cards where there are several.
DEVICES = {
    device.name: device
    for device in (
        Device("h200", 989.4e12, 4.8e12, 141e9, "H200"),
        Device("h100", 989.4e12, 3.35e12, 80e9, "H100 80GB HBM3"),
        Device("a100", 312e12, 2.039e12, 80e9, "A100-SXM4-80GB"),
        Device("l40s", 362.05e12, 864e9, 48e9, "L40S"),
        Device("a10", 125e12, 600e9, 24e9, "A10"),
        Device("l4", 121e12, 300e9, 24e9, "L4"),
    )
}


def device_of(called: str) -> Device | None:
    """The GPU of such a name of torch's, as `NVIDIA H100 80GB HBM3`; None if it is none of these.

    A name that begins with another's is another card: an A10G is no A10.
    """
    words = f" {called} "
    return next((each for each in DEVICES.values() if f" {each.called} " in words), None)
