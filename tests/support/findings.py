"""What doctor finds, in tests: what it says, and a server's flags on a machine without a GPU."""

from vllm.platforms import current_platform

from vllm_kvx.tools.doctor.findings import Finding

ON_CPU = ("--enforce-eager", "--dtype", "float32") if current_platform.is_cpu() else ()


def lines(found: list[Finding], status: str) -> list[str]:
    """What findings of one status say."""
    return [each.says for each in found if each.status == status]
