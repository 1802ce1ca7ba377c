"""LoRA adapters of tiny models on disk, and the checkpoints that each is merged into."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support import inside
from support.engine import Answer, Engine, keep_in_process, running
from support.expected import Policy
from support.parity import assert_parity, room_for

RANK, ALPHA = 8, 16
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_WEIGHTS = "model.safetensors"
# How much a projection's output changes, of what it is: other answers, and no other kind of model.
_CHANGE = 0.5


class Adapters(Mapping[Path | None, Path]):
    """The merged checkpoint of each adapter; None is the base model's."""

    def __init__(self, model: Path, directory: Path, count: int) -> None:
        self._merged: dict[Path | None, Path] = {None: model}
        for seed in range(count):
            adapter = make_adapter(model, directory / f"adapter-{seed}", seed)
            self._merged[adapter] = merge(model, adapter, directory / f"merged-{seed}")

    def __getitem__(self, adapter: Path | None) -> Path:
        return self._merged[adapter]

    def __iter__(self) -> Iterator[Path | None]:
        return iter(self._merged)

    def __len__(self) -> int:
        return len(self._merged)


def assert_merged(
    adapters: Adapters,
    answers: Sequence[Answer],
    policies: Sequence[Policy],
    each: Sequence[Path | None],
) -> None:
    """Each answer is that of the checkpoint that its adapter is merged into."""
    for adapter, model in adapters.items():
        here = [i for i, other in enumerate(each) if other == adapter]
        found = [answers[i] for i in here]
        assert_parity(model, found, [policies[i] for i in here], most=1)


def make_adapter(model: Path, directory: Path, seed: int) -> Path:
    """Writes a random adapter of every projection of `model`, as PEFT does, and returns its folder.

    model: a directory with one safetensors file.
    """
    directory.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in _projections(load_file(model / _WEIGHTS)):
        rows, columns = weight.shape
        down = torch.randn(RANK, columns, generator=generator) / columns**0.5
        up = torch.randn(rows, RANK, generator=generator)
        up *= _CHANGE * weight.norm() / ((up @ down).norm() * ALPHA / RANK)
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA}
    config |= {"target_modules": list(PROJECTIONS), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merge(model: Path, adapter: Path, directory: Path) -> Path:
    """Writes `model` with the adapter added to its weights, and returns its folder."""
    shutil.copytree(model, directory)
    weights = load_file(model / _WEIGHTS)
    added = load_file(adapter / "adapter_model.safetensors")
    for name, weight in _projections(weights):
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        down, up = added[f"{prefix}.lora_A.weight"], added[f"{prefix}.lora_B.weight"]
        weight += ALPHA / RANK * (up @ down)
    save_file(weights, directory / _WEIGHTS, metadata={"format": "pt"})
    return directory


def _projections(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, weight in sorted(weights.items()):
        if name.split(".")[-2] in PROJECTIONS and name.endswith(".weight"):
            yield name, weight


def serving(adapters: Adapters, policies: Sequence[Policy], slots: int) -> Iterator[Engine]:
    """An engine of the base model for a module, whose adapters share `slots` for their weights."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        keep_in_process(monkeypatch)
        inside.use_dense_ops(monkeypatch)
        with running(
            adapters[None],
            "full",
            config=room_for(policies),
            enable_prefix_caching=True,
            enable_lora=True,
            max_loras=slots,
            max_lora_rank=8,
            max_model_len=640,
        ) as engine:
            inside.poison_free_blocks(engine)
            yield engine
