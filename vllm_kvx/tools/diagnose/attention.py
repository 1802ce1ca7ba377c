"""`vllm-kvx diagnose`, StructKV's: where attention settles, and what selecting there leaves.

Per prompt one full-depth pass, of whose attention only the rows of the last w prompt tokens, the
window, are looked at: A, (H, w, N) at each layer, rows that sum to 1.

Figure 4 of the StructKV paper: entropy, sparsity and variance of each layer, the transition score
and the pivot, means over the prompts (vllm_kvx/equations/pivot.py), and what the online rule would
choose; both within their default limits.

Figure 5: attention mass recovery, the share of a layer's full-depth window attention that falls on
the keys which a method leaves it: the mean over heads and window rows of the sum of A over those
keys, then the mean over prompts. Every set has the size that the policy itself would give it, and
holds the window. What pruning does to later hidden states, and so to attention, is left out. With
M = max(int(N * struct_rate), w) tokens selected after the pivot (or the layer given instead):

- structkv: up to the pivot every key, 1.0; above it the M - w keys of highest centrality,
  `C = decay * C + S` over layers 0..pivot (Eq. 2, 3 and 10).
- fastkv: the same by the pivot's saliency alone, max-pooled: FastKV with the pivot as TSP layer.
- gemfilter: at every layer, also below, the M - w keys to which the last token's query attends most
  at the pivot, summed over heads, mean-pooled over 5. GemFilter ranks by the products before the
  softmax, and need not keep the window.
- snapkv: at every layer what each of its KV heads retains for itself, the `cap - w` keys of highest
  max-pooled saliency, cap = max(int(N * kv_rate), w). It saves no prefill and is a yardstick, near
  the most that a set of its size recovers. Its rate is its own: give --kv-rate what --struct-rate
  has to compare sets of one size.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_kvx.equations.pivot import (
    Metrics,
    Weights,
    attention_metrics,
    by_layer,
    mean_metrics,
    online_pivot,
    pivot_within,
    transition_scores,
)
from vllm_kvx.equations.saliency import kept_indices, max_pool, per_kv_head, saliency
from vllm_kvx.errors import ToolError
from vllm_kvx.policy.methods.snapkv import SnapKV
from vllm_kvx.policy.methods.structkv import StructKV, online_limits
from vllm_kvx.records.folder import check_writable
from vllm_kvx.records.model_key import ModelIdentity, model_name
from vllm_kvx.tools.calibrate.figures import pivot_curves
from vllm_kvx.tools.calibrate.pivot import (
    METRICS_HEAD,
    check_finite,
    metrics_line,
    record_of,
    window_attentions,
)
from vllm_kvx.tools.checkpoint.dense_decoder import DenseDecoder
from vllm_kvx.tools.checkpoint.loading import load_config
from vllm_kvx.tools.checkpoint.prompts import load_prompts
from vllm_kvx.tools.checkpoint.report import Progress, facts, measuring, progress_of, prompts_line
from vllm_kvx.tools.diagnose import figures
from vllm_kvx.tools.plots import draw
from vllm_kvx.tools.time_left import Left

METHODS = ("structkv", "fastkv", "gemfilter", "snapkv")
# GemFilter's mean-pooling over scores.
GEMFILTER_KERNEL = 5


def run(args: argparse.Namespace) -> None:
    """The command; `args` as in options.py.

    Raises:
        ToolError, PolicyError: it cannot be done as asked.
    """
    entropy, sparsity, variance = args.weights
    policy = StructKV(
        pivot="calibrated" if args.pivot is None else args.pivot,
        struct_rate=args.struct_rate,
        kv_rate=args.kv_rate,
        window=args.window,
        decay=args.decay,
        entropy_weight=entropy,
        sparsity_weight=sparsity,
        variance_weight=variance,
    )
    snapkv = SnapKV(kv_rate=args.kv_rate, kv_floor=0, window=args.window, kernel=args.kernel)
    config = load_config(args.model, args.revision)
    policy.check_model(config.num_hidden_layers)
    prompts = load_prompts(
        args.prompts, args.model, config, policy.window, args.max_prompt_tokens, args.revision
    )
    directory = Path(args.output or f"diagnose-{Path(model_name(args.model)).name}")
    check_writable(directory, "give --output a directory that can be written")

    decoder = DenseDecoder.load(args.model, args.device, args.dtype, args.revision)
    metrics, votes = measure(decoder, prompts, snapkv)
    record = {
        "model": model_name(args.model),
        "key": ModelIdentity(args.model, config.to_dict(), args.revision).key,
        **pivots(metrics, args.weights, policy),
        "struct_rate": policy.struct_rate,
        "kv_rate": policy.kv_rate,
        "decay": policy.decay,
        "kernel": snapkv.kernel,
    }
    rows = [recovery(vote, policy, record["pivot"]) for vote in votes]
    record["recovery"] = {
        method: {
            "mean": torch.tensor([row[method] for row in rows]).double().mean(dim=0).tolist(),
            "prompts": [row[method] for row in rows],
        }
        for method in METHODS
    }
    record |= facts(prompts, args.prompts)
    print(table(record))
    numbers = directory / "diagnosis.json"
    try:
        numbers.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ToolError(f"cannot write {numbers}: {error.strerror}") from error
    print(f"\nNumbers: {numbers}")
    online = record["online"]["pivot"]
    print(draw(directory / "pivot.png", pivot_curves, record, online))
    print(draw(directory / "recovery.png", figures.recovery_curves, record, labels(record)))


@dataclass(frozen=True)
class Votes:
    """What one prompt's window attends to: (L, keys), on the CPU.

    received: (L, N), mean over heads and window rows; a layer's sum to 1.
    local: (L, N - w), StructKV's local saliency times w, Eq. 2.
    pooled: (L, N - w), FastKV's saliency, summed over the heads.
    last: (L, N - w), the last row's attention, summed over the heads and pooled as GemFilter's.
    snapkv: by layer, the recovery of SnapKV's retained sets.
    """

    received: Tensor
    local: Tensor
    pooled: Tensor
    last: Tensor
    snapkv: list[float]


def measure(
    decoder: DenseDecoder, prompts: Sequence[Sequence[int]], snapkv: SnapKV
) -> tuple[list[Metrics], list[Votes]]:
    """The metrics (L,) and the votes of each prompt, with progress on stderr.

    Raises:
        ToolError: the GPU's memory or the type's range does not suffice.
    """
    metrics, votes = [], []
    left = Left.of(prompts)
    for number, prompt in enumerate(prompts, start=1):
        with measuring(number, prompts) as head:
            progress = progress_of(head, decoder.num_layers, number, left)
            measured = look(decoder, prompt, snapkv, progress)
        check_finite(measured[0], head)
        metrics.append(measured[0])
        votes.append(measured[1])
    return metrics, votes


def look(
    decoder: DenseDecoder, prompt: Sequence[int], snapkv: SnapKV, progress: Progress
) -> tuple[Metrics, Votes]:
    """The metrics (L,) and the votes of one full-depth pass."""
    metrics, retained = [], []
    scores: dict[str, list[Tensor]] = {name: [] for name in ("received", "local", "pooled", "last")}
    cap = snapkv.cap(len(prompt))
    for attention in window_attentions(decoder, prompt, snapkv.window, progress):
        metrics.append(attention_metrics(attention))
        by_head = saliency(attention)  # (H, N - w)
        pooled = per_kv_head(max_pool(by_head, snapkv.kernel), decoder.num_kv_heads)
        unpooled = per_kv_head(by_head, decoder.num_kv_heads)
        kept = kept_indices(pooled, cap, snapkv.window, unpooled)
        retained.append(mass_of_heads(attention, kept))
        scores["received"].append(attention.mean(dim=(0, 1), dtype=torch.float64).cpu())
        scores["local"].append(per_kv_head(by_head, 1)[0].cpu())
        scores["pooled"].append(per_kv_head(pooled, 1)[0].cpu())
        last = attention[:, -1, : by_head.shape[1]].sum(dim=0)
        scores["last"].append(mean_pool(last, GEMFILTER_KERNEL).cpu())
    stacked = {name: torch.stack(layers) for name, layers in scores.items()}
    return by_layer(metrics), Votes(**stacked, snapkv=retained)


def mass_of_heads(attention: Tensor, chosen: Tensor) -> float:
    """Attention (H, w, N) on the keys (G, m) of each row's KV head, mean over heads and rows."""
    heads, window, _ = attention.shape
    keys = chosen.repeat_interleave(heads // chosen.shape[0], dim=0)  # (H, m)
    mass = attention.gather(2, keys[:, None].expand(-1, window, -1))
    return float(mass.sum(dim=2, dtype=torch.float64).mean())


def mean_pool(scores: Tensor, kernel: int) -> Tensor:
    """Mean over `kernel` neighbours, an odd number, zeros beyond the edges: (n,) -> (n,)."""
    return F.avg_pool1d(scores[None], kernel, stride=1, padding=kernel // 2)[0]


def pivots(metrics: Sequence[Metrics], weights: Weights, policy: StructKV) -> dict[str, Any]:
    """The pivot of the mean over the prompts, or the policy's own, and what else would be chosen.

    metrics: of each prompt.
    """
    mean = mean_metrics(metrics)
    record = record_of(mean, policy.window, weights)
    low, high = online_limits(record["layers"])
    return {
        **record,
        "pivot": record["pivot"] if isinstance(policy.pivot, str) else policy.pivot,
        "measured": {
            "pivot": record["pivot"],
            "prompts": [
                pivot_within(transition_scores(*each, weights), *record["limits"])
                for each in metrics
            ],
        },
        "online": {
            "pivot": online_pivot(*mean, weights, low, high),
            "prompts": [online_pivot(*each, weights, low, high) for each in metrics],
            "min_layer": low,
            "max_layer": high,
        },
    }


def recovery(votes: Votes, policy: StructKV, pivot: int) -> dict[str, list[float]]:
    """Attention mass recovery by layer under each of METHODS, as the module's docstring has it."""
    num_layers, num_keys = votes.received.shape
    window, count = policy.window, policy.num_by_rate(num_keys)
    centrality = torch.zeros_like(votes.local[0])
    for local in votes.local[: pivot + 1]:
        centrality = policy.decay * centrality + local
    scores = {"structkv": centrality, "fastkv": votes.pooled[pivot], "gemfilter": votes.last[pivot]}
    unpooled = {"fastkv": votes.local[pivot]}
    masses = {}
    for method, score in scores.items():
        chosen = kept_indices(score, count, window, unpooled.get(method))
        masses[method] = votes.received[:, chosen].sum(dim=1).tolist()
    for method in ("structkv", "fastkv"):
        masses[method] = [1.0] * (pivot + 1) + masses[method][pivot + 1 :]
    assert all(len(mass) == num_layers for mass in masses.values())
    return {**masses, "snapkv": votes.snapkv}


# What comes out.


def labels(record: Mapping[str, Any]) -> dict[str, str]:
    """What the figure calls each method."""
    return {
        "structkv": f"StructKV, {record['struct_rate']:.0%}",
        "fastkv": f"FastKV, {record['struct_rate']:.0%}",
        "gemfilter": f"GemFilter-like, {record['struct_rate']:.0%}",
        "snapkv": f"SnapKV (retained), {record['kv_rate']:.0%}",
    }


def table(record: Mapping[str, Any]) -> str:
    """A line per layer, metrics and recovery, and what follows from them."""
    measured, online, pivot = record["measured"], record["online"], record["pivot"]
    methods = "  ".join(f"{method:>9}" for method in METHODS)
    lines = [
        f"{record['model']}, {record['layers']} layers: {prompts_line(record)},",
        f"window {record['window']}, weights {', '.join(map(str, record['weights']))}, struct_rate "
        f"{record['struct_rate']}, kv_rate {record['kv_rate']} (SnapKV), decay {record['decay']}, "
        f"kernel {record['kernel']}",
        "",
        f"{'':5}  {'':{len(METRICS_HEAD)}}    attention mass recovered",
        f"layer  {METRICS_HEAD}  {methods}",
    ]
    means = {method: record["recovery"][method]["mean"] for method in METHODS}
    for layer in range(record["layers"]):
        shares = "  ".join(f"{means[method][layer]:>9.3f}" for method in METHODS)
        mark = "  <- pivot" if layer == pivot else ""
        lines.append(f"{layer:>5}  {metrics_line(record, layer)}  {shares}{mark}")
    above = [
        f"{method} {sum(mean[pivot + 1 :]) / len(mean[pivot + 1 :]):.3f}"
        for method, mean in means.items()
        if mean[pivot + 1 :]
    ]
    return "\n".join(
        [
            *lines,
            "",
            f"Pivot (Eq. 9): {measured['pivot']}; of the prompts one by one: "
            f"{', '.join(map(str, measured['prompts']))}",
            f"Online rule, layers {online['min_layer']} to {online['max_layer']}: "
            f"{online['pivot']}; of the prompts one by one: "
            f"{', '.join(map(str, online['prompts']))}",
            f"Mean recovery above layer {pivot}: {', '.join(above) or 'there is no layer above'}",
        ]
    )
