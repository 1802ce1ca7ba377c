"""`vllm-kvx calibrate --method structkv --criterion paper`: StructKV's pivot, by its Eq. 4-9.

One full-depth pass per prompt gives each layer's entropy, sparsity and variance; they are averaged
over the prompts, and the layer after the largest transition is the pivot (equations/pivot.py has
the equations). The paper looks for it within the pass that it prunes; its argmax is over all
layers, though, which are only known after the pass. So it is done once, before serving.

Unlike in the paper, only pivots from a quarter to three quarters of the depth are looked at: on
real checkpoints the largest transition was between the lowest layers or near the last one.
"""

import argparse
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vllm_kvx.equations.pivot import (
    Metrics,
    Weights,
    attention_metrics,
    by_layer,
    mean_metrics,
    pivot_within,
    transition_scores,
)
from vllm_kvx.errors import ToolError
from vllm_kvx.policy.methods.structkv import StructKV, paper_limits
from vllm_kvx.records.model_key import ModelIdentity, model_name
from vllm_kvx.tools.calibrate import figures
from vllm_kvx.tools.checkpoint.dense_decoder import DenseDecoder, refuse_windows
from vllm_kvx.tools.checkpoint.loading import load_config
from vllm_kvx.tools.checkpoint.prompts import load_prompts
from vllm_kvx.tools.checkpoint.report import (
    Progress,
    check_cache,
    facts,
    measuring,
    progress_of,
    prompts_line,
    store,
)
from vllm_kvx.tools.plots import draw
from vllm_kvx.tools.time_left import Left

METHOD = "structkv"


def run(args: argparse.Namespace) -> None:
    """The command; `args` as in cli.py.

    Raises:
        ToolError, PolicyError: it cannot be done as asked.
    """
    entropy, sparsity, variance = args.weights
    policy = StructKV(
        window=args.window,
        entropy_weight=entropy,
        sparsity_weight=sparsity,
        variance_weight=variance,
    )
    config = load_config(args.model, args.revision)
    refuse_windows(config)
    limits = choose_limits(config.num_hidden_layers, args.min_layer, args.max_layer)
    prompts = load_prompts(
        args.prompts, args.model, config, policy.window, args.max_prompt_tokens, args.revision
    )
    # Before minutes of work.
    check_cache(METHOD)

    decoder = DenseDecoder.load(args.model, args.device, args.dtype, args.revision)
    metrics = measure(decoder, prompts, policy.window)
    # Not before the weights are there: the key is theirs, and a hub's may have come only now.
    key = ModelIdentity(args.model, config.to_dict(), args.revision).key
    record = {
        "method": METHOD,
        "criterion": "paper",
        "model": model_name(args.model),
        "key": key,
        **record_of(metrics, policy.window, args.weights, limits),
        **facts(prompts, args.prompts),
    }
    print(table(record))
    path = store(record)
    print(
        f"\nStored in {path}: `vllm serve {args.model} --kv-policy {policy.advised}` "
        "finds it there.\n"
        f"Anywhere else: --kv-policy {dataclasses.replace(policy, pivot=record['pivot']).advised}"
    )
    if not args.no_plot:
        picture = Path(args.plot) if args.plot else path.with_suffix(".png")
        print(draw(picture, figures.pivot_curves, record))


def measure(decoder: DenseDecoder, prompts: Sequence[Sequence[int]], window: int) -> Metrics:
    """The model's metrics (L,), means over `prompts`, with progress on stderr.

    Raises:
        ToolError: the GPU's memory or the type's range does not suffice.
    """
    measured, left = [], Left.of(prompts)
    for number, prompt in enumerate(prompts, start=1):
        with measuring(number, prompts) as head:
            progress = progress_of(head, decoder.num_layers, number, left)
            attentions = window_attentions(decoder, prompt, window, progress)
            measured.append(by_layer(map(attention_metrics, attentions)))
        check_finite(measured[-1], head)
    return mean_metrics(measured)


def window_attentions(
    decoder: DenseDecoder, prompt: Sequence[int], window: int, progress: Progress
) -> Iterator[Tensor]:
    """Runs a full-depth pass over a prompt of n tokens; yields each layer's window attention.

    Each is (H, w, n) float32, softmax rows. progress: told the layer that runs.
    """
    steps = decoder.layers(decoder.embed(prompt), window=window)
    for index in range(decoder.num_layers):
        progress(index)
        _, attention = next(steps)
        assert attention is not None
        yield attention


def check_finite(metrics: Metrics, head: str) -> None:
    """Raise ToolError, which begins with `head`, if the type's range did not suffice."""
    if not all(math.isfinite(value) for metric in metrics for value in metric.tolist()):
        raise ToolError(f"{head}: its attention is not finite: use --dtype bfloat16 or float32")


def choose_limits(num_layers: int, first: int | None, last: int | None) -> tuple[int, int]:
    """The lowest and the highest pivot that may be chosen: those given, or `paper_limits`.

    Raises:
        ToolError: they are not layers in this order.
    """
    low, high = paper_limits(num_layers)
    low, high = low if first is None else first, high if last is None else last
    if not 0 <= low <= high < num_layers:
        raise ToolError(
            f"pivots from {low} to {high}: this model has layers 0 .. {num_layers - 1}; set "
            "--min-layer and --max-layer to two of them, in this order"
        )
    return low, high


def record_of(
    metrics: Metrics, window: int, weights: Weights, limits: tuple[int, int] | None = None
) -> dict[str, Any]:
    """The pivot that follows from `metrics`, and what it follows from; fit for JSON.

    limits: the lowest and the highest pivot that may be chosen; `paper_limits` by default.
    """
    scores = transition_scores(*metrics, weights)
    low, high = limits or paper_limits(len(scores))
    return {
        "layers": len(scores),
        "pivot": pivot_within(scores, low, high),
        "limits": [low, high],
        "window": window,
        "weights": list(weights),
        "metrics": {name: metric.tolist() for name, metric in metrics._asdict().items()},
        # JSON has no nan: layer 0 has no transition.
        "transition": [None, *scores.tolist()[1:]],
    }


def table(record: Mapping[str, Any]) -> str:
    """A line per layer; the pivot is marked."""
    weights = ", ".join(map(str, record["weights"]))
    lines = [
        f"StructKV's pivot (Eq. 4-9) of {record['model']}, {record['layers']} layers:",
        f"{prompts_line(record)}, window {record['window']}, weights {weights}",
        "",
        f"layer  {METRICS_HEAD}",
    ]
    for layer in range(record["layers"]):
        mark = "  <- pivot" if layer == record["pivot"] else ""
        lines.append(f"{layer:>5}  {metrics_line(record, layer)}{mark}")
    if record["pivot"] == record["layers"] - 1:
        lines += [
            "",
            "The pivot is the last layer, so every layer would run all tokens: measure on prompts "
            "like yours (--prompts FILE), or choose pivot=<int>.",
        ]
    return "\n".join(lines)


METRICS_HEAD = f"{'entropy':>8}  {'sparsity':>8}  {'variance':>9}  {'transition':>10}"


def metrics_line(record: Mapping[str, Any], layer: int) -> str:
    """A layer's metrics and transition score, below METRICS_HEAD."""
    entropy, sparsity, variance = (values[layer] for values in record["metrics"].values())
    score = record["transition"][layer]
    shown = "-" if score is None else f"{score:.4f}"
    return f"{entropy:>8.4f}  {sparsity:>8.4f}  {variance:>9.3g}  {shown:>10}"
