"""What the criterion `answers` found: the record, its table, and why no layer is chosen."""

from collections.abc import Callable, Mapping
from typing import Any, cast

from vllm_kvx.equations.pivot import mean_metrics
from vllm_kvx.policy.methods.fastkv import FastKV
from vllm_kvx.policy.methods.structkv import StructKV
from vllm_kvx.records.layers import RESULTS
from vllm_kvx.tools.calibrate import pivot, tsp_layer
from vllm_kvx.tools.calibrate.trials import Asked, Attempt, Outcome, Trial, least_answers
from vllm_kvx.tools.checkpoint.answers import RATES, Policy, mean_scores
from vllm_kvx.tools.checkpoint.dense_decoder import DenseDecoder
from vllm_kvx.tools.checkpoint.report import prompts_line

# What is asked where a user gives prompts.
OWN = "own"

NAMES = {FastKV.name: "FastKV's TSP layer", StructKV.name: "StructKV's pivot"}
# The paper's own criterion, by method: its quantity and where it chooses.
PAPERS = {FastKV.name: "Eq. 3", StructKV.name: "Eq. 8"}


MEANINGS = {
    "evidence": "evidence: share of the asked values' tokens that the layer propagates",
    "attention": "attention: share of the answers' attention in the layers above that falls on the "
    "tokens which the layer propagates, over the most that as many tokens get",
}


def parameter_of(policy: Policy) -> str:
    """The parameter that is measured."""
    return policy.to_measure.parameter


def record_of(
    policy: Policy,
    num_layers: int,
    asked: Asked,
    outcome: Outcome,
    cost: Callable[[int, float], float],
) -> dict[str, Any]:
    """The layer and its rate, None if none is chosen, and what it follows from; fit for JSON.

    scores, prefill: by rate as it is written in a policy, of each layer: the mean score by
    reduction, and how many times less prefill computes.
    """
    scores = mean_scores(asked.seen)
    rates = list(dict.fromkeys(choice.rate for choice in scores))
    chosen = None if outcome.chosen is None else outcome.chosen.trial.candidate
    names = ("window", "kernel", "decay")
    settings = {name: value for name, value in policy.parameters().items() if name in names}
    confirmed_by = outcome.confirmed_by
    return {
        "layers": num_layers,
        parameter_of(policy): None if chosen is None else chosen.layer,
        "reduction": None if chosen is None else chosen.choice.reduction,
        RATES[policy.name]: rates[0] if chosen is None else chosen.choice.rate,
        **({"rates": rates} if len(rates) > 1 else {}),
        **settings,
        "scores": {
            str(rate): {
                choice.reduction: layers for choice, layers in scores.items() if choice.rate == rate
            }
            for rate in rates
        },
        "prefill": {
            str(rate): [1 / cost(layer, rate) for layer in range(num_layers - 1)] for rate in rates
        },
        "answered": asked.right,
        "chosen_by": len(asked.questions),
        "confirmed_by": None if confirmed_by is None else len(confirmed_by.questions),
        "confirmation_answered": None if confirmed_by is None else confirmed_by.right,
        "trials": [_attempt(attempt) for attempt in outcome.attempts],
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    candidate = attempt.trial.candidate
    return {
        "layer": candidate.layer,
        "rate": candidate.choice.rate,
        "reduction": candidate.choice.reduction,
        "score": candidate.score,
        **_trial(attempt.trial),
        "confirmation": None if attempt.confirmation is None else _trial(attempt.confirmation),
    }


def _trial(trial: Trial) -> dict[str, Any]:
    """kept, asked: answers, or tokens. share: what stayed of them, and the ends of its interval.

    lost: by task, how many answers did not stay.
    """
    return {
        "kept": trial.kept,
        "asked": trial.asked,
        "prompts": len(trial.pairs),
        "complete": trial.complete,
        "share": list(trial.share),
        "lost": trial.lost,
    }


def papers(decoder: DenseDecoder, asked: Asked, policy: Policy, compare: bool) -> dict[str, Any]:
    """What the paper's criterion gives on the same prompts: `values` by layer, and `layer`.

    Eq. 8 comes from the same passes; Eq. 3 needs more, so it is measured only to `compare`.
    """
    if policy.name == StructKV.name:
        weights = StructKV().weights
        metrics = mean_metrics(one.metrics for one in asked.seen if one.metrics is not None)
        measured = pivot.record_of(metrics, policy.window, weights)
        return {"values": measured["transition"], "layer": measured["pivot"]}
    if not compare:
        return {}
    highest = decoder.num_layers - 2
    prompts = [question.token_ids for question in asked.questions]
    distances = tsp_layer.measure(decoder, prompts, cast(FastKV, policy), highest).mean
    usual = tsp_layer.choose_max_layer(decoder.num_layers)
    layer = min(range(usual + 1), key=distances.__getitem__)
    return {"values": distances, "layer": layer}


def table(record: Mapping[str, Any]) -> str:
    """A line per layer with all criteria side by side; the chosen layer and the paper's marked."""
    method = record["method"]
    score = "evidence" if record["asked"] != OWN else "attention"
    settings = [
        f"{name} {record[name]}"
        for name in (RATES[method], "window", "kernel", "decay")
        if name in record and not (name in RATES.values() and "rates" in record)
    ]
    paper = record["paper"]
    head, under = f"{'':>5}", f"{'layer':>5}"
    for rate, scores in record["scores"].items():
        width = 8 * len(scores) + 10
        head += f"{f'{score}, {RATES[method]} {rate}':>{width}}"
        under += "".join(f"  {name:>6}" for name in scores) + f"  {'prefill':>8}"
    lines = [
        f"{NAMES[method]} by answers, of {record['model']}, {record['layers']} layers:",
        f"{prompts_line(record)}, {', '.join(settings)}",
        MEANINGS[score],
        "prefill: how many times less it computes, by FLOPs",
        "",
        head,
        under + (f"  {PAPERS[method]:>9}" if paper else ""),
    ]
    chosen = record[RESULTS[method]]
    for layer in range(record["layers"] - 1):
        line = f"{layer:>5}"
        for rate, scores in record["scores"].items():
            line += "".join(f"  {values[layer]:>6.3f}" for values in scores.values())
            line += f"  {record['prefill'][rate][layer]:>7.2f}x"
        if paper:
            value = paper["values"][layer]
            line += "  " + ("-" if value is None else f"{value:.4g}").rjust(9)
        if layer == chosen:
            line += f"  <- {RESULTS[method]}, by {record['reduction']}"
            line += f" at {record[RATES[method]]}" if "rates" in record else ""
        if paper and layer == paper["layer"]:
            line += "  <- the paper's"
        lines.append(line)
    if paper and paper["layer"] == record["layers"] - 1:
        lines.append(f"{paper['layer']:>5}  <- the paper's")
    lines += ["", *answered_lines(record)]
    for trial in record["trials"]:
        name = f"layer {trial['layer']}, {trial['reduction']}, {RATES[method]} {trial['rate']}"
        lines.append(f"Answers under {name}: {_stayed(trial)}")
        if trial["confirmation"] is not None:
            lines.append(f"Confirmation of {name}: {_stayed(trial['confirmation'])}")
    return "\n".join(lines)


def _stayed(trial: Mapping[str, Any]) -> str:
    """`31 of 32 stay, 96.9% [84.3-99.4], lost: 1 of notes`; of a trial that ended, so far."""
    value, low, high = (100 * share for share in trial["share"])
    counts = f"{trial['kept']:g} of {trial['asked']:g}"
    what = f"{value:.1f}% [{low:.1f}-{high:.1f}]" if trial["complete"] else "then it was hopeless"
    return f"{counts} stay, {what}{_lost(trial)}"


def _lost(trial: Mapping[str, Any]) -> str:
    """Which tasks' answers did not stay; empty where none is known to be lost."""
    lost = [f"{count:.3g} of {task}" for task, count in trial["lost"].items()]
    return f", lost: {', '.join(lost)}" if lost else ""


def answered_lines(record: Mapping[str, Any]) -> list[str]:
    """What the full model answers."""
    chosen_by, confirmed_by = record["chosen_by"], record["confirmed_by"]
    if record["asked"] == OWN:
        return [
            f"The full model's own answers to the {record['prompts']['count']} prompts are the "
            "measure."
        ]
    lines = [f"The full model answers {record['answered']:g} of the {chosen_by} lookups."]
    if confirmed_by is not None:
        right = record["confirmation_answered"]
        lines.append(f"It answers {right:g} of {confirmed_by} others, which confirm.")
    return lines


def refusal(record: Mapping[str, Any]) -> str:
    """Why no layer is chosen: what was measured, and what to do."""
    parameter, least = RESULTS[record["method"]], least_answers(record["least"])
    way_out = f"use --kv-policy fier-1024, or choose a layer yourself ({parameter}=<int>)"
    known = record["asked"] != OWN
    for right, count, flag in (
        (record["answered"], record["chosen_by"], "--count"),
        (record["confirmation_answered"], record["confirmed_by"], "--confirm"),
    ):
        if known and right is not None and right < least:
            return (
                f"the full model answers {right:g} of {count} generated lookups, and {least} are "
                f"the least to show that {record['least']:.0%} of them stay: give prompts like "
                f"yours with --prompts FILE, raise {flag}, or {way_out}"
            )
    # A trial that was confirmed, or nearly so, says more than one that ended early.
    trial = max(record["trials"], key=_reached)
    last = trial["confirmation"] or trial
    what = "answers" if known else "tokens of answers"
    where = "of the prompts that confirm" if trial["confirmation"] else "of those asked"
    rate = RATES[record["method"]]
    if "rates" not in record:
        way_out = f"give a higher --{rate.replace('_', '-')}, {way_out}"
    return (
        f"no layer keeps enough: under the best of {len(record['trials'])} that were tried, layer "
        f"{trial['layer']} by {trial['reduction']} with {rate}={trial['rate']}, which propagates "
        f"{trial['score']:.0%} of what answers need, {last['kept']:g} of {last['asked']:g} {what} "
        f"{where} stay{_lost(last)}; at least {record['least']:.0%} have to with a certainty of "
        f"95%, here {last['share'][1]:.0%}: {way_out}"
    )


def _reached(trial: Mapping[str, Any]) -> tuple[bool, bool, float]:
    """How far a trial came: to its confirmation, to its end, and the share that stayed."""
    last = trial["confirmation"] or trial
    return trial["confirmation"] is not None, last["complete"], last["share"][0]
