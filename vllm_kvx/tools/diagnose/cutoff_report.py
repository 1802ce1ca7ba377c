"""What the prompts showed of SPEED's cutoffs together: curves, peaks, cutoffs, and their tables.

Layers are counted from 1 here, as in the paper: `speed-K` runs the whole prompt in layers 1 to K.
Of equal layers the lowest is the peak.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_kvx.equations.cutoff import correlation, straightening
from vllm_kvx.tools.diagnose.cutoff import Seen
from vllm_kvx.tools.diagnose.probes import Probe

ALL = "all"
# Shares of unchanged greedy tokens for which the smallest cutoff is shown.
TARGETS = (0.9, 0.99)
# The paper's buffer: of 32 layers its K of 24 and 28 lie 5 and 9 above the highest peak, L19.
PAPER_LAYERS, PAPER_BUFFERS = 32, (5, 9)

_PEAKS = {
    "user": "prompt",
    "first": "BoS",
    "earlier": "decode",
    "entropy": "entropy min",
    "straightening": "straight.",
    "difference": "Ent.-Str.",
    "correlation": "corr.",
}


def record_of(
    probes: Sequence[Probe], seen: Sequence[Seen], cutoffs: Sequence[int], num_layers: int
) -> dict[str, Any]:
    """What is measured, by category and of all prompts, and what follows; fit for JSON."""
    categories = list(dict.fromkeys(probe.category for probe in probes))
    groups = {ALL: list(range(len(probes)))}
    groups |= {
        name: [i for i, probe in enumerate(probes) if probe.category == name] for name in categories
    }
    curves = [_curves(probe, one) for probe, one in zip(probes, seen, strict=True)]
    found = {
        name: {
            **_together([curves[i] for i in members]),
            "cut": _cut([seen[i] for i in members], cutoffs),
        }
        for name, members in groups.items()
    }
    for group in found.values():
        highest = max(group["peaks"]["entropy"], group["peaks"]["straightening"])
        group["suggested"] = {"above": highest, "range": suggested(highest, num_layers)}
    return {
        "layers": num_layers,
        "counted": "layers from 1; speed-K runs the whole prompt in layers 1 to K",
        "units": {"entropy": "nats", "curvature": "degrees", "kl": "nats per answer token"},
        "cutoffs": list(cutoffs),
        "groups": found,
        "samples": [
            {
                "category": probe.category,
                "user_tokens": len(probe.user),
                "answer": list(one.answer),
                "peaks": _peaks(each),
                "kl": one.kl.mean(dim=1).tolist(),
                "same": one.same.double().mean(dim=1).tolist(),
            }
            for probe, one, each in zip(probes, seen, curves, strict=True)
        ],
    }


def suggested(highest: int, num_layers: int) -> list[int] | None:
    """The first and last K by the paper's rule; None if there is no such cutoff.

    The rule: above the layers of selective prompt access and of stabilisation, with a small buffer.
    The paper gives no number; the buffer is that of its own cutoffs, scaled to the model.

    highest: layer of the highest peak, from 1.
    """
    first, last = (
        highest + math.ceil(buffer * num_layers / PAPER_LAYERS) for buffer in PAPER_BUFFERS
    )
    return [first, min(last, num_layers - 1)] if first < num_layers else None


def smallest(cutoffs: Sequence[int], same: Sequence[float], target: float) -> int | None:
    """The smallest cutoff from which on every one that was tried keeps `target`; None without."""
    found = None
    for cutoff, share in sorted(zip(cutoffs, same, strict=True), reverse=True):
        if share < target:
            break
        found = cutoff
    return found


def _curves(probe: Probe, seen: Seen) -> dict[str, Tensor]:
    """One prompt's curves over the layers, (L,) each; entropy over log |U| as `normalised`."""
    user, first, earlier, entropy = seen.shares
    return {
        "user": user,
        "first": first,
        "earlier": earlier,
        "rest": 1 - user - first - earlier,
        "entropy": entropy,
        "normalised": entropy / math.log(len(probe.user)),
        "curvature": seen.curvature.rad2deg(),
        "straightening": straightening(seen.curvature).rad2deg(),
    }


def _peaks(curves: Mapping[str, Tensor]) -> dict[str, Any]:
    """The layers of Table 23; the entropy's is that of the normalised one, Figure 3's."""
    layers = {
        name: int(curves[name].argmax()) + 1
        for name in ("user", "first", "earlier", "straightening")
    }
    entropy = int(curves["normalised"].argmin()) + 1
    related = correlation(curves["straightening"], -curves["normalised"])
    return layers | {
        "entropy": entropy,
        "difference": entropy - layers["straightening"],
        "correlation": related if math.isfinite(related) else None,
    }


def _together(prompts: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """Mean curves over prompts, their peaks (Table 23) and the prompts' alignment (Table 24)."""
    means = {name: torch.stack([each[name] for each in prompts]).mean(dim=0) for name in prompts[0]}
    differences = torch.tensor([_peaks(each)["difference"] for each in prompts]).double()
    return {
        "prompts": len(prompts),
        "curves": {name: values.tolist() for name, values in means.items()},
        "peaks": _peaks(means),
        "alignment": {
            "mean": differences.mean().item(),
            "std": differences.std(correction=0).item(),
            "exact": (differences == 0).double().mean().item(),
            "within_1": (differences.abs() <= 1).double().mean().item(),
            "within_2": (differences.abs() <= 2).double().mean().item(),
        },
    }


def _cut(seen: Sequence[Seen], cutoffs: Sequence[int]) -> dict[str, Any]:
    """What each cutoff changes, means over all answer tokens."""
    kl = torch.cat([one.kl for one in seen], dim=1).mean(dim=1).tolist()
    same = torch.cat([one.same for one in seen], dim=1).double().mean(dim=1).tolist()
    return {
        "tokens": sum(len(one.answer) for one in seen),
        "kl": kl,
        "same": same,
        "smallest": {str(target): smallest(cutoffs, same, target) for target in TARGETS},
    }


# What is printed.


def table(record: Mapping[str, Any]) -> str:
    """Layer by layer, then the paper's two tables, then what cutoffs follow."""
    return "\n".join(
        [
            *_head(record),
            "",
            *_layers(record),
            "",
            *_peaks_table(record),
            "",
            *_alignment_table(record),
            "",
            *_outcome(record),
        ]
    )


def _head(record: Mapping[str, Any]) -> Iterator[str]:
    groups, tokens = record["groups"], record["prompts"]["tokens"]
    kinds = ", ".join(f"{group['prompts']} {name}" for name, group in groups.items() if name != ALL)
    answers = [len(sample["answer"]) for sample in record["samples"]]
    yield f"SPEED's cutoffs for {record['model']}, {record['layers']} layers"
    yield (
        f"Prompts: {kinds}; of {min(tokens)}-{max(tokens)} tokens, answers of {min(answers)}-"
        f"{max(answers)}; anchors {record['anchors']}, tail {record['tail']}"
    )
    yield (
        f"Layers are counted from 1, as in the paper: speed-K runs the whole prompt in layers 1 "
        f"to K, and only anchors, tail and generated tokens in K + 1 to {record['layers']}."
    )


def _layers(record: Mapping[str, Any]) -> Iterator[str]:
    group = record["groups"][ALL]
    curves, peaks, cut = group["curves"], group["peaks"], group["cut"]
    row_of = {cutoff: row for row, cutoff in enumerate(record["cutoffs"])}
    yield (
        f"{'':5}  {'attention of generated tokens to':33}  {'prompt entropy':>15}  "
        f"{'straighten-':>11}  {'cut at K = layer':>18}"
    )
    yield (
        f"layer  {'user':>6}  {'first':>6}  {'earlier':>7}  {'rest':>7}  {'nats':>6}  "
        f"{'/log|U|':>7}  {'ing, deg':>11}  {'KL':>6}  {'same token':>10}"
    )
    for index in range(record["layers"]):
        layer, row = index + 1, row_of.get(index + 1)
        shares = "  ".join(f"{curves[name][index]:6.3f}" for name in ("user", "first"))
        shares += "  " + "  ".join(f"{curves[name][index]:7.3f}" for name in ("earlier", "rest"))
        entropy = f"{curves['entropy'][index]:6.2f}  {curves['normalised'][index]:7.3f}"
        changed = f"{'-':>6}  {'-':>10}"
        if row is not None:
            changed = f"{cut['kl'][row]:6.3f}  {cut['same'][row]:10.1%}"
        line = f"{layer:>5}  {shares}  {entropy}  {curves['straightening'][index]:11.2f}  {changed}"
        marks = {"entropy": "entropy min", "straightening": "straightening peak"}
        names = [mark for name, mark in marks.items() if peaks[name] == layer]
        yield line + "".join(f"  <- {name}" for name in names)


def _peaks_table(record: Mapping[str, Any]) -> Iterator[str]:
    yield "Peaks, by layer (the paper's table 23)"
    yield f"{'':10}{'n':>4}" + "".join(f"  {label:>11}" for label in _PEAKS.values())
    for name, group in _groups(record):
        peaks = group["peaks"]
        line = f"{name:10}{group['prompts']:>4}"
        for key in _PEAKS:
            value = peaks[key]
            if key == "difference":
                text = f"{value:+d}"
            elif key == "correlation":
                text = "-" if value is None else f"{value:.3f}"
            else:
                text = f"L{value}"
            line += f"  {text:>11}"
        yield line


def _alignment_table(record: Mapping[str, Any]) -> Iterator[str]:
    yield "Entropy minimum less straightening peak, prompt by prompt (table 24)"
    labels = ("mean", "std", "exact", "within 1", "within 2")
    yield f"{'':10}{'n':>4}" + "".join(f"  {label:>8}" for label in labels)
    for name, group in _groups(record):
        values = group["alignment"].values()
        yield f"{name:10}{group['prompts']:>4}" + "".join(f"  {value:8.2f}" for value in values)


def _outcome(record: Mapping[str, Any]) -> Iterator[str]:
    yield "Cutoffs, by the paper's rule and by what stays of the answers"
    stay = "".join(f"  {f'{target:.0%} stay':>9}" for target in TARGETS)
    yield f"{'':10}{'n':>4}  {'peaks up to':>11}  {'rule':>9}{stay}  {'of tokens':>9}"
    for name, group in _groups(record):
        limits, cut = group["suggested"]["range"], group["cut"]
        rule = "none" if limits is None else f"K={limits[0]}..{limits[1]}"
        line = f"{name:10}{group['prompts']:>4}  {'L' + str(group['suggested']['above']):>11}"
        line += f"  {rule:>9}"
        for found in cut["smallest"].values():
            line += f"  {f'K>={found}' if found else 'none':>9}"
        yield f"{line}  {cut['tokens']:>9}"
    yield (
        "rule: K above entropy minimum and straightening peak, with a small buffer; none if they "
        "lie too high."
    )
    yield "It reads the full-depth model: where tuning may keep quality, not what a cut loses."
    yield (
        "stay: greedy tokens of the full-depth answer, from this K on, with the weights as they "
        "are; optimistic,"
    )
    yield "because chosen on the tokens that it is measured with."


def _groups(record: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Every category, and all together where there are several."""
    groups = record["groups"]
    named = [(name, group) for name, group in groups.items() if name != ALL]
    return named + [(ALL, groups[ALL])] * (len(named) > 1)
