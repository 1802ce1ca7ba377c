"""The model, from its configuration and the sizes of its files: what it is, and what runs it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_kvx.records.model_key import architecture_of, model_dir, weight_files
from vllm_kvx.tools.doctor.findings import Context, Finding, note, ok, problem, reason
from vllm_kvx.tools.doctor.model_limits import FULL_ALONE, NO_POLICY, limits_of, reads_media


def model(context: Context) -> Iterator[Finding]:
    """Finds the model and reads its configuration."""
    name = context.request.model
    if name is None:
        context.missing["model"] = context.missing["layers"] = "no MODEL was named"
        yield note("no MODEL was named", "vllm-kvx doctor MODEL --kv-policy POLICY")
        return
    context.directory = model_dir(name, context.request.revision)
    if context.directory is None:
        context.missing["model"] = context.missing["layers"] = f"{name} was not found"
        at = f" --revision {context.request.revision}" if context.request.revision else ""
        yield problem(
            f"{name} is no folder, and the hub's cache on this machine has no config.json of it; "
            "doctor downloads nothing",
            f"hf download {name} config.json{at}, or name a folder",
        )
        return
    path = context.directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        context.missing["layers"] = f"{path} cannot be read"
        yield problem(f"{path} cannot be read: {reason(error)}", "name a folder with a model")
        return
    yield ok(f"{name}, in {context.directory}")
    context.text_config = _text_config(context, config)
    yield from _architecture(context, architecture_of(config))
    yield from _weights(context.directory)


def _text_config(context: Context, config: dict[str, Any]) -> dict[str, Any]:
    """The text model's configuration as servers read it; as it stands, where that fails."""
    plain = {**config, **config.get("text_config", {})}
    # transformers may import torch.
    if "torch" in context.missing:
        return plain
    try:
        from transformers import AutoConfig

        read = AutoConfig.from_pretrained(str(context.directory), local_files_only=True)
        found: dict[str, Any] = read.get_text_config().to_dict()
    except Exception:  # What it cannot read, vLLM says better.
        return plain
    return {**found, "architectures": found.get("architectures") or config.get("architectures")}


def _architecture(context: Context, architecture: str | None) -> Iterator[Finding]:
    layers = context.text_config.get("num_hidden_layers")
    if not isinstance(layers, int) or layers < 1:
        context.missing["layers"] = "config.json has no number of layers"
        yield note("config.json has no num_hidden_layers, so no policy's layout can be told")
    if {"torch", "vllm"} & context.missing.keys() or architecture is None:
        yield note(f"{architecture} of {layers} layers")
        return
    limits = list(limits_of(architecture, context.text_config))
    if not limits:
        yield ok(f"{architecture} of {layers} layers: every policy runs it")
    for limit in limits:
        yield note(f"{architecture}: {limit.reason}", f"name {limit.remain}")
    if not {FULL_ALONE, NO_POLICY} & {limit.remain for limit in limits} and reads_media(
        architecture
    ):
        yield note(
            f"{architecture} reads images or sound too: servers whose policies only retain or "
            "retrieve take them, most of them (`flags` says which), and others its text alone"
        )


def _weights(directory: Path) -> Iterator[Finding]:
    files = weight_files(directory)
    if not files:
        yield note(
            "no weights are here: a server downloads them, and records are told apart by them"
        )
        return
    size = sum(path.stat().st_size for path in files)
    yield ok(f"weights: {len(files)} file{'s' if len(files) > 1 else ''}, {size / 2**20:,.1f} MiB")
