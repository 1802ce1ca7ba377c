"""`vllm-kvx diagnose --method speed`: where a model's prompt may end, layer by layer.

The paper's diagnostic on the full-depth model (its appendices B.2 and E), with its tables 23 and 24
and its figure 3; and what it does not have, the loss of each cutoff itself on weights as they are:
the full-depth model's answer, token by token, under every speed-K (cutoff.py).
"""

import argparse
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from vllm_kvx.errors import ToolError
from vllm_kvx.policy.methods.speed import Speed
from vllm_kvx.records.folder import check_writable
from vllm_kvx.records.model_key import ModelIdentity, model_name
from vllm_kvx.tools.checkpoint.dense_decoder import DenseDecoder
from vllm_kvx.tools.checkpoint.loading import load_config
from vllm_kvx.tools.checkpoint.questions import FAMILIES, load_tokenizer
from vllm_kvx.tools.checkpoint.report import counter_of, facts, measuring, progress_of
from vllm_kvx.tools.diagnose import figures
from vllm_kvx.tools.diagnose.cutoff import Seen, check_finite, look
from vllm_kvx.tools.diagnose.cutoff_report import record_of, table
from vllm_kvx.tools.diagnose.probes import (
    OWN,
    Probe,
    chat_probes,
    check_probes,
    lookup_probes,
    own_probes,
)
from vllm_kvx.tools.plots import draw
from vllm_kvx.tools.time_left import Left

# Lookups whose answers decide whether the model is asked this family of tasks.
FIRST = 4
NUMBERS = "diagnosis-speed.json"


def run(args: argparse.Namespace) -> None:
    """The command; `args` as in options.py.

    Raises:
        ToolError, PolicyError: it cannot be done as asked.
    """
    policy = Speed(1, anchors=args.anchors, tail=args.tail)
    config = load_config(args.model, args.revision)
    policy.check_model(config.num_hidden_layers)
    cutoffs = range(args.every, config.num_hidden_layers, args.every)
    if not cutoffs:
        most = config.num_hidden_layers - 1
        raise ToolError(f"--every {args.every} leaves no cutoff of 1 to {most}: use less")
    if args.prompts is not None:
        own = own_probes(args.prompts, args.model, config, args.max_prompt_tokens, args.revision)
        families: Sequence[str] = (OWN,)
    else:
        tokenizer = load_tokenizer(args.model, args.revision)
        families = tuple(FAMILIES)

    @cache
    def make(family: str) -> list[Probe]:
        if family == OWN:
            made = own
        else:
            made = lookup_probes(
                family, args.count, args.length, args.answer_tokens, tokenizer, config
            )
            if family == families[0]:
                # A model that follows no instruction is not asked these either.
                made += chat_probes(tokenizer)
        check_probes(made, policy, args.answer_tokens, config)
        return made

    # Before minutes of work.
    for family in families:
        make(family)
    directory = Path(args.output or f"diagnose-{Path(model_name(args.model)).name}")
    check_writable(directory, "give --output a directory that can be written")

    decoder = DenseDecoder.load(args.model, args.device, args.dtype, args.revision)
    family, seen = ask(decoder, families, make, policy, cutoffs, args.answer_tokens)
    asked = make(family)
    record = {
        "method": Speed.name,
        "model": Path(model_name(args.model)).name if Path(args.model).is_dir() else args.model,
        "key": ModelIdentity(args.model, config.to_dict(), args.revision).key,
        "anchors": policy.anchors,
        "tail": policy.tail,
        "answer_tokens": args.answer_tokens,
        "asked": family,
        **record_of(asked, seen, cutoffs, decoder.num_layers),
        **facts([probe.token_ids for probe in asked], args.prompts),
    }
    print(table(record))
    numbers = directory / NUMBERS
    try:
        numbers.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ToolError(f"cannot write {numbers}: {error.strerror}") from error
    print(f"\nNumbers: {numbers}")
    print(draw(directory / "speed-layers.png", figures.access_curves, record))
    print(draw(directory / "speed-cutoffs.png", figures.cutoff_curves, record))


def ask(
    decoder: DenseDecoder,
    families: Sequence[str],
    make: Callable[[str], Sequence[Probe]],
    policy: Speed,
    cutoffs: Sequence[int],
    answer_tokens: int,
) -> tuple[str, list[Seen]]:
    """The first family of which the model answers any of the first lookups, or the last one.

    With what was seen of each of its prompts, which `make` gives; progress is on stderr.

    Raises:
        ToolError: the GPU's memory or the type's range does not suffice.
    """
    for family in families:
        probes, seen = make(family), list[Seen]()
        prompts, right = [probe.token_ids for probe in probes], False
        left = Left.of(prompts)
        for number, probe in enumerate(probes, start=1):
            with measuring(number, prompts) as head:
                layers = progress_of(head, decoder.num_layers, number, left)
                cuts = counter_of(f"{head}: cutoffs", len(cutoffs))
                seen.append(look(decoder, probe, policy, cutoffs, answer_tokens, layers, cuts))
            check_finite(seen[-1], head)
            right = right or (probe.score is not None and probe.score(seen[-1].answer) > 0)
            lookups = sum(each.score is not None for each in probes)
            if family != families[-1] and not right and number >= min(FIRST, lookups):
                break
        else:
            return family, seen
    raise AssertionError("the last family is asked to its end")
