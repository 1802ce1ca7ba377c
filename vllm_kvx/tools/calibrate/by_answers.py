"""`vllm-kvx calibrate`: FastKV's TSP layer or StructKV's pivot, chosen by answers (answers.py).

Candidates are layers that choose a share of the tokens. The one with the least work in prefill
wins whose answers stay, decoded on two sets of prompts: those that it is chosen by and others that
confirm it (trials.py). At one cost the paper's reduction is preferred. If nothing holds, nothing
is chosen.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from vllm_kvx.errors import ToolError
from vllm_kvx.policy.axes import WINDOW_REDUCTIONS
from vllm_kvx.policy.methods.fastkv import FastKV
from vllm_kvx.policy.methods.structkv import StructKV
from vllm_kvx.records.model_key import ModelIdentity, model_name
from vllm_kvx.tools.calibrate import figures
from vllm_kvx.tools.calibrate.answers_report import (
    OWN,
    papers,
    parameter_of,
    record_of,
    refusal,
    table,
)
from vllm_kvx.tools.calibrate.trials import (
    Asked,
    Candidate,
    Trial,
    candidates,
    choose,
    least_answers,
    try_out,
)
from vllm_kvx.tools.checkpoint.answers import (
    RATES,
    Choice,
    Policy,
    Question,
    Seen,
    at_rate,
    choices_of,
    look,
    mean_scores,
)
from vllm_kvx.tools.checkpoint.dense_decoder import DenseDecoder, sliding_layers
from vllm_kvx.tools.checkpoint.loading import load_config
from vllm_kvx.tools.checkpoint.prompts import load_prompts
from vllm_kvx.tools.checkpoint.questions import CALIBRATION, load_tokenizer, lookups, own
from vllm_kvx.tools.checkpoint.report import (
    check_cache,
    counter_of,
    facts,
    measuring,
    progress_of,
    store,
)
from vllm_kvx.tools.ideal.shape import Shape
from vllm_kvx.tools.ideal.work import prefill_ratio
from vllm_kvx.tools.plots import draw
from vllm_kvx.tools.time_left import Left

CRITERION = "answers"
# Lookups whose answers decide whether the model is asked this family of tasks.
FIRST = 4
# The rates that are searched where the policy leaves its own open: the paper's, and up to twice as
# many tokens, beyond which the layers above save little.
SEARCHED = (0.2, 0.3, 0.4)
# Prompts by which a choice is confirmed, at the least.
CONFIRM = 32


def run(args: argparse.Namespace) -> None:
    """The command; `args` as in cli.py.

    Raises:
        ToolError, PolicyError: it cannot be done as asked, or no layer keeps the answers.
    """
    policy = policy_of(args)
    rates = rates_of(policy)
    reductions = reductions_of(policy, args.reduction)
    config = load_config(args.model, args.revision)
    if config.num_hidden_layers < 2:
        raise ToolError("a model of 1 layer has none to propagate to")
    window = policy.window
    families: Sequence[str] = (OWN,)
    if args.prompts is not None:
        prompts = load_prompts(
            args.prompts, args.model, config, window, args.max_prompt_tokens, args.revision
        )
        for confirms in (False, True):
            check_count(len(own_prompts(prompts, confirms)), args.least, "give more prompts")
    else:
        check_count(args.count, args.least, "use a greater --count")
        check_count(args.confirm, args.least, "use a greater --confirm")
        families = tuple(CALIBRATION)
        tokenizer = load_tokenizer(args.model, args.revision)
        length = min(args.length, args.max_prompt_tokens or args.length)

    @cache
    def make(family: str, confirms: bool = False) -> list[Question]:
        """The prompts to choose by, or those that confirm."""
        if family == OWN:
            return own_prompts(prompts, confirms)
        numbers = range(args.count, args.count + args.confirm) if confirms else range(args.count)
        return lookups(family, numbers, length, tokenizer, config, window)

    # Before minutes of work.
    make(families[0])
    check_cache(args.method)

    decoder = DenseDecoder.load(args.model, args.device, args.dtype, args.revision, spread=True)
    choices = choices_of(rates)
    family, asked = ask(decoder, families, make, policy, choices)

    def confirm_by() -> Asked:
        others = make(family, confirms=True)
        if others == asked.questions:
            return asked
        return Asked(others, see(decoder, others, policy, choices))

    def try_one(some: Asked, candidate: Candidate) -> Trial:
        count = sum(one.right > 0 for one in some.seen)
        progress = counter_of(f"answers under {candidate}", count)
        return try_out(decoder, some, candidate, args.least, progress)

    longest = max(len(question.token_ids) for question in asked.questions)
    cost = cost_of(policy, config.to_dict(), longest)
    sliding = sliding_layers(config)
    order = candidates(mean_scores(asked.seen), cost, reductions, args.target, sliding)
    outcome = choose(asked, confirm_by, order, args.least, try_one)
    # Not before the weights are there: the key is theirs, and a hub's may have come only now.
    key = ModelIdentity(args.model, config.to_dict(), args.revision).key
    seen_too = outcome.confirmed_by
    others = () if seen_too is None or seen_too is asked else seen_too.questions
    record = {
        "method": args.method,
        "criterion": CRITERION,
        "model": model_name(args.model),
        "key": key,
        **record_of(policy, decoder.num_layers, asked, outcome, cost),
        "target": args.target,
        "least": args.least,
        "reductions": list(reductions),
        "asked": family,
        "paper": papers(decoder, asked, at_rate(policy, rates[0]), args.compare),
        **facts([each.token_ids for each in (*asked.questions, *others)], args.prompts),
    }
    print(table(record))
    if record[parameter_of(policy)] is None:
        raise ToolError(refusal(record))
    path = store(record)
    layer: Any = {parameter_of(policy): record[parameter_of(policy)]}
    if policy.to_measure.leaves_rate(policy):
        layer[policy.to_measure.rate] = record[policy.to_measure.rate]
    if record["reduction"] != WINDOW_REDUCTIONS[0]:
        layer[policy.to_measure.reduction] = record["reduction"]
    chosen = replace(policy, **layer)
    print(
        f"\nStored in {path}: `vllm serve {args.model} --kv-policy {policy.advised}` "
        "finds it there.\n"
        f"Anywhere else: --kv-policy {chosen.advised}"
    )
    if not args.no_plot:
        picture = Path(args.plot) if args.plot else path.with_suffix(".png")
        print(draw(picture, figures.answer_curves, record))


def policy_of(args: argparse.Namespace) -> Policy:
    """What is calibrated: its window, rate and score are those given."""
    if args.method == FastKV.name:
        return FastKV(tsp_rate=args.tsp_rate, window=args.window, kernel=args.kernel)
    return StructKV(struct_rate=args.struct_rate, window=args.window, decay=args.decay)


def rates_of(policy: Policy) -> tuple[float, ...]:
    """The rates that may be chosen: the policy's own, or SEARCHED where it leaves that open."""
    rate: float | None = getattr(policy, RATES[policy.name])
    if rate is None:
        return SEARCHED
    if rate == 1:
        raise ToolError("a rate of 1 drops no token, so every layer is as good: use less than 1")
    return (rate,)


def reductions_of(policy: Policy, wanted: str | None) -> tuple[str, ...]:
    """The reductions that may be chosen: what the policy has, or `wanted` alone."""
    served = WINDOW_REDUCTIONS if policy.to_measure.reduction else WINDOW_REDUCTIONS[:1]
    if wanted is None:
        return served
    if wanted not in served:
        raise ToolError(f"{policy.name} scores by {' or '.join(served)}: leave out --reduction")
    return (wanted,)


def check_count(count: int, least: float, way_out: str) -> None:
    """Raise ToolError if so many prompts cannot show that `least` of the answers stay."""
    if least == 1:
        raise ToolError(
            "--least 1: no number of prompts shows that every answer stays: use less than 1"
        )
    needed = least_answers(least)
    if count < needed:
        raise ToolError(
            f"{count} prompts: even a layer that keeps every answer is not known to keep "
            f"{least:.0%} by fewer than {needed} right ones: {way_out}, or a lower --least"
        )


def own_prompts(prompts: Sequence[Sequence[int]], confirms: bool) -> list[Question]:
    """A user's prompts to choose by, or those that confirm.

    They are every second one each, so that both are alike. Where there are fewer than twice CONFIRM
    all of them are both.

    Raises:
        ToolError: there are fewer than CONFIRM.
    """
    if len(prompts) < CONFIRM:
        raise ToolError(
            f"{len(prompts)} prompts: a layer is confirmed by decoding at least {CONFIRM}: give "
            "more, or leave out --prompts, and lookups are generated"
        )
    if len(prompts) >= 2 * CONFIRM:
        prompts = prompts[1::2] if confirms else prompts[::2]
    return own(prompts)


def cost_of(policy: Policy, config: dict[str, Any], length: int) -> Callable[[int, float], float]:
    """FLOPs of prefill over the full model's, by layer and rate, for a prompt of `length` tokens.

    Floors, which keep more of short prompts than the rate does, are left out, as in what is tried.
    """
    shape, floor = Shape.from_config(config), RATES[policy.name].replace("rate", "floor")

    @cache
    def cost(layer: int, rate: float) -> float:
        changed: dict[str, Any] = {parameter_of(policy): layer, floor: 0}
        ratio = prefill_ratio(shape, str(replace(at_rate(policy, rate), **changed)), length)
        assert ratio is not None, "its layer is given"
        return 1 / ratio

    return cost


# Measuring.


def ask(
    decoder: DenseDecoder,
    families: Sequence[str],
    make: Callable[[str], Sequence[Question]],
    policy: Policy,
    choices: Sequence[Choice],
) -> tuple[str, Asked]:
    """The first family of which the full model answers any of the first lookups, or the last one.

    With what was seen of each of its questions, which `make` gives; progress is on stderr.

    Raises:
        ToolError: the GPU's memory or the type's range does not suffice.
    """
    for family in families:
        questions = make(family)
        first = FIRST if family != families[-1] else None
        seen = see(decoder, questions, policy, choices, first)
        if len(seen) == len(questions):
            return family, Asked(questions, seen)
    raise AssertionError("the last family is asked to its end")


def see(
    decoder: DenseDecoder,
    questions: Sequence[Question],
    policy: Policy,
    choices: Sequence[Choice],
    first: int | None = None,
) -> list[Seen]:
    """What a dense pass over each prompt shows; progress is on stderr.

    first: so many prompts of which the full model has none right end it; None for none.

    Raises:
        ToolError: the GPU's memory or the type's range does not suffice.
    """
    seen: list[Seen] = []
    prompts = [question.token_ids for question in questions]
    left = Left.of(prompts)
    for number, question in enumerate(questions, start=1):
        with measuring(number, prompts) as head:
            progress = progress_of(head, decoder.num_layers, number, left)
            metrics = policy.name == StructKV.name
            seen.append(look(decoder, question, policy, choices, progress, metrics))
        if first is not None and number == first and not any(one.right for one in seen):
            break
    return seen
