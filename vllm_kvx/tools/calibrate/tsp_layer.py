"""`vllm-kvx calibrate --criterion paper`: FastKV's TSP layer for a model, by its Eq. 3.

For each calibration prompt i and each candidate layer L, H'_{L,i} is what the model makes of the
prompt if tokens are selected after layer L, and H_i if none are:

    TSP layer = argmin over L <= L_max of the mean over i of ||H_i - H'_{L,i}||^2 / ||H_i||^2

Where the paper leaves room: H is the last prompt token's state after the final norm, which is what
the logits are made from; the division lets every prompt weigh the same (the paper's Figure 3 is
normalised too); of equal means the lowest layer wins. Retention has no part in it: it does not
touch the prompt's own pass.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vllm_kvx.equations.saliency import kept_indices, propagation_scores
from vllm_kvx.errors import ToolError
from vllm_kvx.policy.methods.fastkv import FastKV
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

METHOD = "fastkv"


def run(args: argparse.Namespace) -> None:
    """The command; `args` as in cli.py.

    Raises:
        ToolError, PolicyError: it cannot be done as asked.
    """
    policy = FastKV(tsp_rate=args.tsp_rate, window=args.window, kernel=args.kernel)
    if policy.token_rate == 1:
        raise ToolError("tsp_rate 1 drops no token, so every layer is as good: use less than 1")
    if args.prompts is None:
        raise ToolError("Eq. 3 is measured on prompts like yours: give them with --prompts FILE")
    config = load_config(args.model, args.revision)
    refuse_windows(config)
    max_layer = choose_max_layer(config.num_hidden_layers, args.max_layer)
    prompts = load_prompts(
        args.prompts, args.model, config, policy.window, args.max_prompt_tokens, args.revision
    )
    # Before minutes of work.
    check_cache(METHOD)

    decoder = DenseDecoder.load(args.model, args.device, args.dtype, args.revision)
    measured = measure(decoder, prompts, policy, max_layer)
    # Not before the weights are there: the key is theirs, and a hub's may have come only now.
    key = ModelIdentity(args.model, config.to_dict(), args.revision).key
    record = {
        **record_of(args.model, key, decoder.num_layers, policy, measured),
        **facts(prompts, args.prompts),
    }
    print(table(record))
    path = store(record)
    print(
        f"\nStored in {path}: `vllm serve {args.model} --kv-policy {policy.advised}` "
        "finds it there.\n"
        f"Anywhere else: --kv-policy {replace(policy, tsp_layer=record['tsp_layer']).advised}"
    )
    if not args.no_plot:
        picture = Path(args.plot) if args.plot else path.with_suffix(".png")
        print(draw(picture, figures.tsp_curve, record))


# Eq. 3.


@dataclass(frozen=True)
class Distances:
    """||H_i - H'_{L,i}||^2 / ||H_i||^2: one row per prompt, one entry per layer 0..L_max."""

    rows: list[list[float]]

    @property
    def mean(self) -> list[float]:
        """Per layer, over the prompts."""
        return [statistics.fmean(column) for column in zip(*self.rows, strict=True)]

    @property
    def std(self) -> list[float]:
        """Population standard deviation per layer, over the prompts; 0 for one prompt."""
        return [statistics.pstdev(column) for column in zip(*self.rows, strict=True)]

    @property
    def tsp_layer(self) -> int:
        return min(range(len(self.mean)), key=self.mean.__getitem__)


def choose_max_layer(num_layers: int, wanted: int | None = None) -> int:
    """L_max: `wanted`, or by default the end of the lower half, as in all of the paper's models.

    Raises:
        ToolError: `wanted` is not a layer, or has none above it.
    """
    last = num_layers - 2
    if last < 0:
        raise ToolError(f"a model of {num_layers} layer has none to propagate to")
    if wanted is None:
        return max(num_layers // 2 - 1, 0)
    if not 0 <= wanted <= last:
        raise ToolError(
            f"max layer {wanted}: this model has {num_layers} layers, and after the last one "
            f"nothing is left to save; use --max-layer 0 .. {last}"
        )
    return wanted


def measure(
    decoder: DenseDecoder, prompts: Sequence[Sequence[int]], policy: FastKV, max_layer: int
) -> Distances:
    """Eq. 3's distances of `prompts`, with progress on stderr.

    Raises:
        ToolError: the GPU's memory or the type's range does not suffice.
    """
    rows: list[list[float]] = []
    left = Left.of(prompts)
    for number, prompt in enumerate(prompts, start=1):
        with measuring(number, prompts) as head:
            progress = progress_of(head, decoder.num_layers, number, left)
            rows.append(distances(decoder, prompt, policy, max_layer, progress))
        if not all(map(math.isfinite, rows[-1])):
            raise ToolError(f"{head}: its states are not finite: use --dtype bfloat16 or float32")
    return Distances(rows)


def distances(
    decoder: DenseDecoder,
    prompt: Sequence[int],
    policy: FastKV,
    max_layer: int,
    progress: Progress | None = None,
) -> list[float]:
    """The relative squared distance of Eq. 3 for each layer 0..max_layer.

    One full-depth pass; after each candidate layer the selected rows go up from there at once, so
    that no more than one layer's states are kept.
    """
    count = policy.num_by_rate(len(prompt))
    rows = decoder.embed(prompt)
    states = []
    steps = decoder.layers(rows, window=policy.window)
    for index in range(decoder.num_layers):
        if progress is not None:
            progress(index)
        rows, attention = next(steps)
        if index <= max_layer:
            assert attention is not None
            chosen = propagated(attention, count, policy.kernel)
            states.append(decoder.finish(rows.select(chosen), index + 1))
    full = decoder.last_state(rows).double()
    return [float((full - state).square().sum() / full.square().sum()) for state in states]


def propagated(attention: Tensor, count: int, kernel: int) -> Tensor:
    """Rows that FastKV propagates (Eq. 1 and 2), from window attention (H, w, n): (count,) int64.

    Summed over the heads, where Eq. 2 averages: the order is the same.
    """
    pooled, unpooled = (propagation_scores(attention, width, "sum") for width in (kernel, 1))
    return kept_indices(pooled, count, attention.shape[1], unpooled)


# What comes out.


def record_of(
    model: str, key: str, num_layers: int, policy: FastKV, measured: Distances
) -> dict[str, Any]:
    """The answer, and what it was measured with."""
    return {
        "method": METHOD,
        "criterion": "paper",
        "model": model_name(model),
        "key": key,
        "layers": num_layers,
        "tsp_layer": measured.tsp_layer,
        "max_layer": len(measured.mean) - 1,
        "tsp_rate": policy.token_rate,
        "window": policy.window,
        "kernel": policy.kernel,
        "distances": {"mean": measured.mean, "std": measured.std},
    }


def table(record: dict[str, Any]) -> str:
    """A line per candidate layer; the chosen one is marked."""
    lines = [
        f"FastKV's TSP layer (Eq. 3) of {record['model']}, {record['layers']} layers:",
        f"{prompts_line(record)}, tsp_rate {record['tsp_rate']}, window {record['window']}, "
        f"kernel {record['kernel']}",
        "",
        f"{'layer':>5}  {'mean distance':>13}  {'std':>9}",
    ]
    means, stds = record["distances"]["mean"], record["distances"]["std"]
    for layer, (mean, std) in enumerate(zip(means, stds, strict=True)):
        mark = "  <- tsp_layer" if layer == record["tsp_layer"] else ""
        lines.append(f"{layer:>5}  {mean:>13.4g}  {std:>9.3g}{mark}")
    return "\n".join(lines)
