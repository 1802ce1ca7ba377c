"""Tiny checkpoints in the formats that quantised weights come in, and what they stand for.

A format writes the tensors that vLLM's loaders read, packed by the rules of the format's own
specification, and the same weights dequantised, as a float32 checkpoint that the dense references
load. Nothing here is read from vLLM or from a library of quantisation.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from reference.models import build_model
from reference.speed import load
from reference.zoo import LAYERS
from reference.zoo import build as build_zoo
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

FP8, FP8_MAX = torch.float8_e4m3fn, 448.0
GROUP = 128  # of AWQ and GPTQ, and the side of a block of FP8 weights
MX_GROUP = 32
# Magnitudes of a 4-bit float (E2M1) by its lower three bits.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# AWQ's order of eight columns in an int32, from the lowest four bits.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_LINEAR = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))
# Linear layers that vLLM makes one of, so that they have one scale where a tensor has one.
_MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

# A weight (N, K) float32 -> the tensors that a checkpoint has, by the end of their names, and the
# weight that these stand for. `peak` is the largest magnitude of the tensors that share its scale.
Packs = Callable[[Tensor, float], tuple[dict[str, Tensor], Tensor]]
# What a layer makes of its input (n, K) before it multiplies.
Rounds = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Format:
    """How weights are stored.

    config: `quantization_config` of config.json; None where the engine quantises as it loads.
    packs: None leaves a weight as it is.
    options: of the engine.
    model: a name of ``reference.zoo``, or None for Llama.
    experts_only: whether attention keeps its weights.
    rounds: of every quantised layer's input.
    off: how far logprobs may be from the reference: in the median, and nine times in ten.
    """

    packs: Packs
    off: tuple[float, float]
    dtype: str = "float16"
    config: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    experts_only: bool = False
    rounds: Rounds | None = None


@dataclass(frozen=True)
class Quantized:
    """A checkpoint, and models that the dense references run.

    model: of the dequantised weights, which rounds inputs as the format does.
    original: of the weights before they were quantised.
    """

    path: Path
    format: Format
    model: PreTrainedModel
    original: PreTrainedModel

    @property
    def options(self) -> dict[str, Any]:
        return {"dtype": self.format.dtype, **self.format.options}

    @contextmanager
    def as_served(self) -> Iterator[PreTrainedModel]:
        """`model`, whose quantised layers round their inputs while the block runs."""
        if self.format.rounds is None:
            yield self.model
            return
        names = _quantized(self.format, dict(self.model.named_parameters()))
        with _Rounding(self.format.rounds, [self.model.get_parameter(name) for name in names]):
            yield self.model


class _Rounding(TorchFunctionMode):
    """Linear layers of some weights, experts' among them, round their inputs first."""

    def __init__(self, rounds: Rounds, weights: list[Tensor]) -> None:
        self.rounds = rounds
        self.storages = {each.untyped_storage().data_ptr() for each in weights}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            given, weight, *rest = args
            if weight.untyped_storage().data_ptr() in self.storages:
                args = (self.rounds(given), weight, *rest)
        return func(*args, **(kwargs or {}))


def _quantized(format: Format, tensors: dict[str, Any]) -> list[str]:
    """Names of the weights that the format packs, of a checkpoint or of a model."""
    ends = (*_LINEAR, "experts.gate_up_proj", "experts.down_proj")
    return [
        name
        for name in tensors
        if name.endswith(ends) and (".experts." in name or not format.experts_only)
    ]


def make(path: Path, format: Format, *, seed: int = 0) -> Quantized:
    """Writes a checkpoint of `format` below `path`: eight layers, heads of 64 channels."""
    plain = path / "plain"
    if format.model is None:
        build_model(plain, arch="llama", head_dim=64, hidden=256, intermediate=256, seed=seed)
    else:
        sizes = {"head_dim": 64, "hidden_size": 256, "moe_intermediate_size": 256}
        build_zoo(plain, format.model, seed=seed, **sizes)
    stored = _rounded(load_file(plain / "model.safetensors"))
    names = _quantized(format, stored)
    packed, dense = dict(stored), dict(stored)
    for name in names:
        peak = max(float(stored[each].abs().max()) for each in _sharing(name, stored))
        tensors, dense[name] = format.packs(stored[name], peak)
        if format.config is not None:
            del packed[name]
            stem = name.removesuffix("weight")
            packed |= {stem + end: tensor for end, tensor in tensors.items()}
    dtype = getattr(torch, format.dtype)
    packed = {
        name: tensor.to(dtype) if tensor is stored.get(name) else tensor
        for name, tensor in packed.items()
    }
    made = {
        "packed": (packed, format.config, format.dtype),
        "dense": (dense, None, "float32"),
        "original": (stored, None, "float32"),
    }
    for folder, (tensors, quantization, kind) in made.items():
        shutil.copytree(plain, path / folder)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            path / folder / "model.safetensors",
            {"format": "pt"},
        )
        file = path / folder / "config.json"
        config = json.loads(file.read_text()) | {"dtype": kind}
        if quantization is not None:
            config["quantization_config"] = quantization
        file.write_text(json.dumps(config))
    models = [load(path / folder) for folder in ("dense", "original")]
    for model in models:
        # Experts one by one, each by a linear layer.
        model.set_experts_implementation("eager")
    return Quantized(path / "packed", format, *models)


def _rounded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights that 16-bit floats of both kinds hold."""
    return {name: each.to(torch.bfloat16).to(torch.float32) for name, each in tensors.items()}


def _sharing(name: str, names: dict[str, Tensor]) -> list[str]:
    """The weights that share a scale with one, where a tensor has one."""
    for group in _MERGED:
        part = next((part for part in group if f".{part}." in name), None)
        if part is not None:
            return [each for other in group if (each := name.replace(part, other)) in names]
    return [name]


# Packing.


def fp8_per_tensor(weight: Tensor, peak: float) -> tuple[dict[str, Tensor], Tensor]:
    """One scale for a linear layer as vLLM has it."""
    scale = torch.tensor(peak / FP8_MAX)
    codes = (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def fp8_per_channel(weight: Tensor, _peak: float) -> tuple[dict[str, Tensor], Tensor]:
    """A scale for each output channel, as compressed-tensors stores FP8."""
    scale = weight.abs().amax(dim=1, keepdim=True) / FP8_MAX
    codes = (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def fp8_per_block(weight: Tensor, _peak: float) -> tuple[dict[str, Tensor], Tensor]:
    """A scale for each block of 128 x 128, as DeepSeek and Qwen publish FP8."""
    rows, columns = (size // GROUP for size in weight.shape)
    blocks = weight.view(rows, GROUP, columns, GROUP)
    scale = blocks.abs().amax(dim=(1, 3)) / FP8_MAX
    wide = scale[:, None, :, None]
    codes = (blocks / wide).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    dense = (codes.float() * wide).view(weight.shape)
    return {"weight": codes.view(weight.shape), "weight_scale_inv": scale}, dense


def gptq(weight: Tensor, _peak: float) -> tuple[dict[str, Tensor], Tensor]:
    """4 bits around 8, groups of 128 inputs; eight inputs to an int32, the first one lowest."""
    groups = weight.T.reshape(-1, GROUP, len(weight))  # (K / 128, 128, N)
    scale = (groups.abs().amax(dim=1, keepdim=True) / 7).half().float()
    codes = (groups / scale).round().clamp(-8, 7) + 8
    dense = ((codes - 8) * scale).view(weight.T.shape).T
    inputs = codes.view(-1, 8, len(weight)).to(torch.int64)
    zeros = torch.full((len(groups), len(weight) // 8), 0x77777777, dtype=torch.int32)
    stored = {
        "qweight": _int32(inputs.transpose(1, 2)),
        "qzeros": zeros,
        "scales": scale[:, 0].half(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }
    return stored, dense


def awq(weight: Tensor, _peak: float) -> tuple[dict[str, Tensor], Tensor]:
    """4 bits above a zero point of 4 bits, groups of 128; eight outputs to an int32, shuffled."""
    groups = weight.T.reshape(-1, GROUP, len(weight))
    low, high = groups.amin(dim=1, keepdim=True), groups.amax(dim=1, keepdim=True)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(0, 15)
    codes = ((groups / scale).round() + zero).clamp(0, 15)
    dense = ((codes - zero) * scale).view(weight.T.shape).T

    def shuffled(each: Tensor) -> Tensor:
        return _int32(each.reshape(*each.shape[:-1], -1, 8)[..., AWQ_ORDER].to(torch.int64))

    stored = {
        "qweight": shuffled(codes.view(-1, len(weight))),
        "qzeros": shuffled(zero[:, 0]),
        "scales": scale[:, 0].half(),
    }
    return stored, dense


def _int32(nibbles: Tensor) -> Tensor:
    """(..., 8) int64 of four bits each -> (...) int32, the first one lowest."""
    whole = (nibbles << torch.arange(0, 32, 4)).sum(dim=-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)


def mxfp4(weight: Tensor, _peak: float) -> tuple[dict[str, Tensor], Tensor]:
    """4-bit floats, a power of two for every 32 inputs; two inputs to a byte, the first lower."""
    groups = weight.view(len(weight), -1, MX_GROUP)
    # The largest magnitude becomes one between 4 and 8, of which 6 is the last.
    exponent = groups.abs().amax(dim=-1, keepdim=True).log2().floor() - 2
    scaled = groups / exponent.exp2()
    magnitudes = torch.tensor(E2M1)
    nearest = (scaled.abs()[..., None] - magnitudes).abs().argmin(dim=-1)
    dense = (magnitudes[nearest] * scaled.sign() * exponent.exp2()).view(weight.shape)
    codes = (nearest + 8 * (scaled < 0)).view(len(weight), -1, 2)
    stored = {
        "weight_packed": (codes[..., 0] + 16 * codes[..., 1]).to(torch.uint8),
        "weight_scale": (exponent[..., 0] + 127).to(torch.uint8),
    }
    return stored, dense


# Inputs.


def fp8_inputs(given: Tensor, group: int | None = None) -> Tensor:
    """Each row rounded to FP8 with a scale of its own, or each `group` of its channels."""
    parts = given.view(*given.shape[:-1], -1, group or given.shape[-1])
    scale = parts.abs().amax(dim=-1, keepdim=True).clamp(min=1e-10) / FP8_MAX
    return ((parts / scale).to(FP8).float() * scale).view(given.shape)


# Formats.


def _compressed(kind: str, *ignored: str, **group: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head", *ignored],
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
    }


def _scheme(bits: int, strategy: str, *, dynamic: bool = False, **more: Any) -> dict[str, Any]:
    fields = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy}
    return fields | {"dynamic": dynamic} | more


# How far logprobs may be off: about three times what rounding of 16 bits did to the references
# themselves. A token that rounding selects or drops shows nine times in ten at most. Where inputs
# are rounded to 8 bits too, a difference in the last bit grows from layer to layer to that of the
# rounding itself.
# On an H100 the first two went up to (0.034, 0.21) and (0.16, 0.54), under policies that choose.
TIGHT, _BFLOAT16, _ROUNDED = (0.06, 0.4), (0.3, 1.0), (0.8, 2.0)

_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [GROUP, GROUP],
    "modules_to_not_convert": ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(LAYERS))],
}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
_CHANNELS = _scheme(8, "channel")
_TOKENS = _scheme(8, "token", dynamic=True)

FORMATS: dict[str, Format] = {
    "fp8_online": Format(
        fp8_per_tensor,
        _ROUNDED,
        options={"quantization": "fp8_per_tensor"},
        rounds=fp8_inputs,
    ),
    "fp8_compressed": Format(
        fp8_per_channel,
        _ROUNDED,
        config=_compressed("float-quantized", weights=_CHANNELS, input_activations=_TOKENS),
        rounds=fp8_inputs,
    ),
    "fp8_weights": Format(
        fp8_per_channel, TIGHT, config=_compressed("float-quantized", weights=_CHANNELS)
    ),
    "awq": Format(awq, TIGHT, config=_AWQ | {"version": "gemm"}),
    "gptq": Format(gptq, TIGHT, config=_GPTQ),
    "fp8_experts": Format(
        fp8_per_block,
        _ROUNDED,
        dtype="bfloat16",
        config=_BLOCKS,
        model="qwen3_moe",
        rounds=partial(fp8_inputs, group=GROUP),
    ),
    "mxfp4_experts": Format(
        mxfp4,
        _BFLOAT16,
        dtype="bfloat16",
        config=_compressed(
            "mxfp4-pack-quantized",
            "re:.*self_attn.*",
            "re:.*mlp\\.gate$",
            weights=_scheme(4, "group", group_size=MX_GROUP),
        ),
        model="qwen3_moe",
        experts_only=True,
    ),
}
