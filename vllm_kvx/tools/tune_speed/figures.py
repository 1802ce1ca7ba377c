"""The plot of a tuning run: loss by step, and held-out agreement."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_kvx.tools import plots


def draw(path: Path, losses: Mapping[str, Any]) -> str:
    """Draws `losses` (train.py's file); says where, or why not."""
    return plots.draw(path, loss_curves, losses)


def loss_curves(pyplot: Any, losses: Mapping[str, Any]) -> Any:
    """Two panels over steps: the loss, and held-out tokens and answers as at full depth."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5))
    logged = [entry for entry in losses["log"] if "loss" in entry]
    left.plot([e["step"] for e in logged], [e["loss"] for e in logged], linewidth=1)
    plots.say_if_empty(left, [e["loss"] for e in logged])
    left.set(xlabel="step", ylabel="loss", yscale="log", title=f"training, {len(logged)} values")
    held = [(0, losses["before"]["all"])]
    held += [
        (entry["step"], {k.removeprefix("held_out_"): v for k, v in entry.items()})
        for entry in losses["log"]
        if "held_out_greedy" in entry
    ]
    steps = [step for step, _ in held]
    for name, label in (("greedy", "same token"), ("same", "same answer")):
        right.plot(steps, [100 * found[name] for _, found in held], marker="o", label=label)
    title = f"agreement, n = {losses['before']['all']['answers']} answers"
    right.set(xlabel="step", ylabel="held out, as at full depth (%)", title=title)
    right.legend()
    figure.tight_layout()
    return figure
