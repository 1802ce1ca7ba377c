"""What the criterion `answers` found: the record, its table, and why no layer is chosen."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from vllm_kvx.equations.pivot import mean_metrics
from vllm_kvx.policy.methods.fastkv import FastKV
from vllm_kvx.policy.methods.structkv import StructKV
from vllm_kvx.records.layers import RESULTS
from vllm_kvx.tools.calibrate import pivot, tsp_layer
from vllm_kvx.tools.checkpoint.answers import (
    Outcome,
    Policy,
    Question,
    Seen,
    mean_scores,
    prefill_ratio,
)
from vllm_kvx.tools.checkpoint.dense_decoder import DenseDecoder
from vllm_kvx.tools.checkpoint.report import prompts_line

# What is asked where a user gives prompts.
OWN = "own"
# So many lookups the full model must have right, for what stays right to say anything.
ANSWERED = 8

NAMES = {FastKV.name: "FastKV's TSP layer", StructKV.name: "StructKV's pivot"}
# The paper's own criterion, by method: its quantity and where it chooses.
PAPERS = {FastKV.name: "Eq. 3", StructKV.name: "Eq. 8"}


MEANINGS = {
    "evidence": "evidence: share of the asked values' tokens that the layer propagates",
    "attention": "attention: share of the answers' attention in the layers above that falls on the "
    "tokens which the layer propagates, over the most that as many tokens get",
}


def least_answers(count: int) -> int:
    """How many of `count` lookups the full model must have right."""
    return min(ANSWERED, count)


def parameter_of(policy: Policy) -> str:
    """The parameter that is measured."""
    return policy.to_measure.parameter


def rate_of(policy: Policy) -> float:
    """Share of the tokens that is propagated."""
    rate = policy.parameters()["tsp_rate" if policy.name == FastKV.name else "struct_rate"]
    assert isinstance(rate, float | int)
    return rate


def record_of(
    policy: Policy, num_layers: int, seen: Sequence[Seen], outcome: Outcome
) -> dict[str, Any]:
    """The layer, None if none is chosen, and what it follows from; fit for JSON."""
    chosen, right = outcome.chosen, sum(one.right for one in seen)
    names = ("tsp_rate", "window", "kernel", "struct_rate", "decay")
    settings = {name: value for name, value in policy.parameters().items() if name in names}
    return {
        "layers": num_layers,
        parameter_of(policy): None if chosen is None else chosen.candidate.layer,
        "reduction": None if chosen is None else chosen.candidate.reduction,
        **settings,
        "scores": mean_scores(seen),
        "answered": right,
        "trials": [
            {
                "layer": trial.candidate.layer,
                "reduction": trial.candidate.reduction,
                "score": trial.candidate.score,
                "kept": trial.kept,
                "asked": trial.asked,
            }
            for trial in outcome.trials
        ],
    }


def papers(
    decoder: DenseDecoder,
    questions: Sequence[Question],
    policy: Policy,
    seen: Sequence[Seen],
    compare: bool,
) -> dict[str, Any]:
    """What the paper's criterion gives on the same prompts: `values` by layer, and `layer`.

    Eq. 8 comes from the same passes; Eq. 3 needs more, so it is measured only to `compare`.
    """
    if policy.name == StructKV.name:
        weights = StructKV().weights
        metrics = mean_metrics(one.metrics for one in seen if one.metrics is not None)
        measured = pivot.record_of(metrics, policy.window, weights)
        return {"values": measured["transition"], "layer": measured["pivot"]}
    if not compare:
        return {}
    highest = decoder.num_layers - 2
    prompts = [question.token_ids for question in questions]
    distances = tsp_layer.measure(decoder, prompts, cast(FastKV, policy), highest).mean
    usual = tsp_layer.choose_max_layer(decoder.num_layers)
    layer = min(range(usual + 1), key=distances.__getitem__)
    return {"values": distances, "layer": layer}


def table(record: Mapping[str, Any]) -> str:
    """A line per layer with all criteria side by side; the chosen layer and the paper's marked."""
    method, rate = record["method"], record.get("tsp_rate", record.get("struct_rate"))
    known = record["asked"] != OWN
    score = "evidence" if known else "attention"
    settings = [
        f"{name} {record[name]}"
        for name in ("tsp_rate", "struct_rate", "window", "kernel", "decay")
        if name in record
    ]
    paper = record["paper"]
    head = "".join(f"  {f'{score}, {name}':>14}" for name in record["scores"])
    lines = [
        f"{NAMES[method]} by answers, of {record['model']}, {record['layers']} layers:",
        f"{prompts_line(record)}, {', '.join(settings)}",
        MEANINGS[score],
        "",
        f"{'layer':>5}{head}" + (f"  {PAPERS[method]:>9}" if paper else "") + "  prefill by layers",
    ]
    chosen = record[RESULTS[method]]
    for layer in range(record["layers"] - 1):
        line = f"{layer:>5}" + "".join(f"  {s[layer]:>14.3f}" for s in record["scores"].values())
        if paper:
            value = paper["values"][layer]
            line += "  " + ("-" if value is None else f"{value:.4g}").rjust(9)
        line += f"  {prefill_ratio(layer, record['layers'], rate):>16.2f}x"
        if layer == chosen:
            line += f"  <- {RESULTS[method]}, by {record['reduction']}"
        if paper and layer == paper["layer"]:
            line += "  <- the paper's"
        lines.append(line)
    if paper and paper["layer"] == record["layers"] - 1:
        lines.append(f"{paper['layer']:>5}  <- the paper's")
    lines += ["", answered_line(record)]
    lines += [
        f"Answers under layer {trial['layer']}, {trial['reduction']}: {trial['kept']:g} of "
        f"{trial['asked']:g} stay"
        for trial in record["trials"]
    ]
    return "\n".join(lines)


def answered_line(record: Mapping[str, Any]) -> str:
    """What the full model answers."""
    count = record["prompts"]["count"]
    if record["asked"] == OWN:
        return f"The full model's own answers to the {count} prompts are the measure."
    return f"The full model answers {record['answered']:g} of the {count} lookups."


def refusal(record: Mapping[str, Any]) -> str:
    """Why no layer is chosen: what was measured, and what to do."""
    parameter, count = RESULTS[record["method"]], record["prompts"]["count"]
    way_out = f"use --kv-policy snapkv or fier-1024, or choose a layer yourself ({parameter}=<int>)"
    if record["asked"] != OWN and record["answered"] < least_answers(count):
        score, layer, reduction = max(
            (score, -layer, reduction)
            for reduction in record["reductions"]
            for layer, score in enumerate(record["scores"][reduction])
        )
        return (
            f"the full model answers {record['answered']:g} of {count} generated lookups, and "
            f"{least_answers(count)} are the least to see what stays of them (layer {-layer} by "
            f"{reduction} propagates most of their evidence, {score:.0%}): give prompts like yours "
            f"with --prompts FILE, raise --count, or {way_out}"
        )
    trial = max(record["trials"], key=lambda trial: trial["kept"] / trial["asked"])
    what = "answers" if record["asked"] != OWN else "tokens of answers"
    return (
        f"no layer keeps enough: under the best that was tried, layer {trial['layer']} by "
        f"{trial['reduction']}, which propagates {trial['score']:.0%} of what answers need, "
        f"{trial['kept']:g} of {trial['asked']:g} {what} stay, and {record['least']:.0%} are the "
        f"least: {way_out}"
    )
