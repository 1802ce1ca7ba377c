"""`vllm-kvx calibrate`: FastKV's TSP layer or StructKV's pivot, chosen by answers (answers.py).

The earliest layer wins whose score comes within `--target` of the best one's and under which the
answers are decoded as the full model's are; the earlier it is, the faster is prefill. On one layer
the paper's reduction is preferred. If no layer keeps enough, none is chosen.
"""

import argparse
from collections.abc import Callable, Collection, Sequence
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
    least_answers,
    papers,
    parameter_of,
    rate_of,
    record_of,
    refusal,
    table,
)
from vllm_kvx.tools.checkpoint.answers import (
    Outcome,
    Policy,
    Question,
    Seen,
    Trial,
    candidates,
    look,
    mean_scores,
    tolerated_losses,
    try_out,
)
from vllm_kvx.tools.checkpoint.dense_decoder import DenseDecoder, load_config, sliding_layers
from vllm_kvx.tools.checkpoint.prompts import load_prompts
from vllm_kvx.tools.checkpoint.questions import FAMILIES, load_tokenizer, lookups, own
from vllm_kvx.tools.checkpoint.report import (
    check_cache,
    counter_of,
    facts,
    measuring,
    progress_of,
    store,
)
from vllm_kvx.tools.plots import draw
from vllm_kvx.tools.time_left import Left

CRITERION = "answers"
# Lookups whose answers decide whether the model is asked this family of tasks.
FIRST = 4


def run(args: argparse.Namespace) -> None:
    """The command; `args` as in cli.py.

    Raises:
        ToolError, PolicyError: it cannot be done as asked, or no layer keeps the answers.
    """
    policy = policy_of(args)
    if rate_of(policy) == 1:
        raise ToolError("a rate of 1 drops no token, so every layer is as good: use less than 1")
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
    else:
        families = tuple(FAMILIES)
        tokenizer = load_tokenizer(args.model, args.revision)
        length = min(args.length, args.max_prompt_tokens or args.length)

    @cache
    def make(family: str) -> list[Question]:
        if family == OWN:
            return own(prompts)
        return lookups(family, args.count, length, tokenizer, config, window)

    # Before minutes of work.
    make(families[0])
    check_cache(args.method)

    decoder = DenseDecoder.load(args.model, args.device, args.dtype, args.revision, spread=True)
    family, seen = ask(decoder, families, make, policy)
    questions = make(family)
    sliding = sliding_layers(config)
    outcome = choose(decoder, questions, seen, reductions, args.target, args.least, sliding)
    # Not before the weights are there: the key is theirs, and a hub's may have come only now.
    key = ModelIdentity(args.model, config.to_dict(), args.revision).key
    record = {
        "method": args.method,
        "criterion": CRITERION,
        "model": model_name(args.model),
        "key": key,
        **record_of(policy, decoder.num_layers, seen, outcome),
        "target": args.target,
        "least": args.least,
        "reductions": list(reductions),
        "asked": family,
        "paper": papers(decoder, questions, policy, seen, args.compare),
        **facts([question.token_ids for question in questions], args.prompts),
    }
    print(table(record))
    if record[parameter_of(policy)] is None:
        raise ToolError(refusal(record))
    path = store(record)
    layer: Any = {parameter_of(policy): record[parameter_of(policy)]}
    if record["reduction"] != WINDOW_REDUCTIONS[0]:
        layer[policy.to_measure.reduction] = record["reduction"]
    chosen = replace(policy, **layer)
    print(
        f"\nStored in {path}: `vllm serve {args.model} --kv-policy {policy}` finds it there.\n"
        f"Anywhere else: --kv-policy {chosen}"
    )
    if not args.no_plot:
        picture = Path(args.plot) if args.plot else path.with_suffix(".png")
        print(draw(picture, figures.answer_curves, record))


def policy_of(args: argparse.Namespace) -> Policy:
    """What is calibrated: its window, rate and score are those given."""
    if args.method == FastKV.name:
        return FastKV(tsp_rate=args.tsp_rate, window=args.window, kernel=args.kernel)
    return StructKV(struct_rate=args.struct_rate, window=args.window, decay=args.decay)


def reductions_of(policy: Policy, wanted: str | None) -> tuple[str, ...]:
    """The reductions that may be chosen: what the policy has, or `wanted` alone."""
    served = WINDOW_REDUCTIONS if policy.to_measure.reduction else WINDOW_REDUCTIONS[:1]
    if wanted is None:
        return served
    if wanted not in served:
        raise ToolError(f"{policy.name} scores by {' or '.join(served)}: leave out --reduction")
    return (wanted,)


# Measuring.


def ask(
    decoder: DenseDecoder,
    families: Sequence[str],
    make: Callable[[str], Sequence[Question]],
    policy: Policy,
) -> tuple[str, list[Seen]]:
    """The first family of which the full model answers any of the first lookups, or the last one.

    With what was seen of each of its questions, which `make` gives; progress is on stderr.

    Raises:
        ToolError: the GPU's memory or the type's range does not suffice.
    """
    for family in families:
        questions, seen = make(family), list[Seen]()
        prompts = [question.token_ids for question in questions]
        left = Left.of(prompts)
        for number, question in enumerate(questions, start=1):
            with measuring(number, prompts) as head:
                progress = progress_of(head, decoder.num_layers, number, left)
                metrics = policy.name == StructKV.name
                seen.append(look(decoder, question, policy, progress, metrics))
            hopeless = number >= min(FIRST, len(questions)) and not any(s.right for s in seen)
            if hopeless and family != families[-1]:
                break
        else:
            return family, seen
    raise AssertionError("the last family is asked to its end")


def choose(
    decoder: DenseDecoder,
    questions: Sequence[Question],
    seen: Sequence[Seen],
    reductions: Sequence[str],
    target: float,
    least: float,
    sliding: Collection[int] = (),
) -> Outcome:
    """Try the candidates in turn, and choose the first that loses no more than one at `target` may.

    If there is none, the one under which most answers stay. No layer is chosen under which fewer
    than `least` of them stay, whatever its score: only the answers say what the model makes of it.

    sliding: layers that are no candidates, since their keys cannot select tokens.
    """
    if sum(one.right for one in seen) < least_answers(len(seen)):
        return Outcome()
    known = questions[0].score is not None
    # Of a lookup's answer all or nothing stays, of another answer token by token.
    count = sum(one.right if known else len(one.answer) for one in seen)
    most = (1 - least) * count + 1e-9
    tolerated = min(tolerated_losses(round(count), target), most)
    trials: list[Trial] = []
    sizes = [len(question.token_ids) for question in questions]
    # Attention says less than evidence, and tokens are many, so that no layer is right by chance.
    scores = mean_scores(seen)
    for candidate in candidates(scores, reductions, target, not known, sliding):
        progress = counter_of(f"answers under {candidate}", len(questions), sizes)
        trials.append(try_out(decoder, questions, seen, candidate, most, progress))
        if trials[-1].complete and trials[-1].lost <= tolerated:
            return Outcome(tuple(trials), trials[-1])
    enough = [trial for trial in trials if trial.complete]
    # Of equals max() takes the first.
    return Outcome(tuple(trials), max(enough, key=lambda trial: trial.kept, default=None))
