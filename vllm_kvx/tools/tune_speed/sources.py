"""Where the examples of a run come from: checked before anything long starts, and then made."""

import argparse
import json
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers

from vllm_kvx.errors import ToolError
from vllm_kvx.records.model_key import ModelIdentity
from vllm_kvx.tools.checkpoint.dense_decoder import sliding_window
from vllm_kvx.tools.tune_speed import packs, selfwritten, turns
from vllm_kvx.tools.tune_speed.dialogues import (
    Dialogue,
    Templated,
    assistant,
    read,
    templated,
    user,
)
from vllm_kvx.tools.tune_speed.packs import Example
from vllm_kvx.tools.tune_speed.plan import RECITALS, SHORTEST, TURN, TURNS, Plan
from vllm_kvx.tools.tune_speed.teacher import Teacher, examples
from vllm_kvx.tools.tune_speed.train import EXAMPLES

# A run's own files, in a folder of the tuned checkpoint's; PLAN says what its examples are.
FOLDER, PLAN = "tuning", "plan.json"


def plan_of(args: argparse.Namespace, config: Any) -> Plan:
    """Which prompts; raises ToolError where the model or the options do not allow them."""
    for name, others in (("sft", ("prompts", "examples")), ("examples", ("prompts",))):
        if getattr(args, name) and any(getattr(args, other) for other in others):
            leave_out = " and ".join(f"--{other}" for other in others)
            raise ToolError(f"--{name} brings its own prompts: leave out {leave_out}")
    limits = (getattr(config, "max_position_embeddings", None), sliding_window(config))
    longest = min((limit for limit in limits if limit), default=args.max_length)
    if args.max_length > longest:
        raise ToolError(
            f"--max-length {args.max_length} is more than the model's {longest} tokens: use at "
            f"most {longest}"
        )
    if args.examples:
        facts = facts_of(Path(args.examples) / FOLDER)
        del facts["model_key"]
        return Plan(**facts | {"max_length": args.max_length, "held_out": args.held_out})
    made = 0 if args.sft else args.count
    if made < 0 or not (made or args.prompts or args.sft):
        raise ToolError("nothing to learn from: give --count above 0, --prompts or --sft")
    recitals, asked = _recitals_and_turns(args, round(made * args.lookups))
    further = asked - 1
    least = 2 if args.sft else args.answer_tokens + (SHORTEST if made else 1) + TURN * further
    if args.max_length < least:
        raise ToolError(f"--max-length {args.max_length} is too short: use at least {least}")
    file = args.sft or args.prompts
    return Plan(
        prompts=str(Path(file).resolve()) if file else None,
        sft=bool(args.sft),
        count=made,
        lookups=args.lookups,
        recitals=recitals,
        turns=asked,
        max_length=args.max_length,
        answer_tokens=args.answer_tokens,
        held_out=args.held_out,
        seed=args.seed,
    )


def _recitals_and_turns(args: argparse.Namespace, lookups: int) -> tuple[float, int]:
    """The share of recitals among so many lookups and the turns of each, as given; where they are
    not, as many as the chat template and the lengths allow.

    Raises:
        ToolError: turns are given that have no lookups, or leave no room to a text.
    """
    most = 1 + args.max_length // (2 * TURN)
    if args.turns and args.turns > 1 and not lookups:
        raise ToolError("--turns has no meaning without lookups: give --count and --lookups")
    if args.turns and args.turns > most:
        raise ToolError(
            f"--turns {args.turns} may take more than half of --max-length {args.max_length} from "
            f"a text: use at most {most}"
        )
    if not lookups or (args.recitals is not None and args.turns is not None):
        return args.recitals or 0.0, args.turns or 1
    tokenizer = _tokenizer(args)
    recitals, asked = args.recitals, args.turns
    if not tokenizer.chat_template:
        # That nothing can be made without one is said by `check`.
        return recitals or 0.0, asked or 1
    template = f"the chat template of {args.model} does not allow"
    if recitals is None:
        recitals = RECITALS
        if _no_recitals(tokenizer):
            recitals = 0.0
            print(f"no recitals: {template} them", file=sys.stderr)
    if asked is None:
        # At most a quarter of the room is theirs: long prompts are what is served.
        room = 1 + (args.max_length - args.answer_tokens) // (4 * TURN)
        asked = max(min(TURNS, room), 1)
        if _no_turns(tokenizer):
            asked = 1
            print(f"one question to a text: {template} more", file=sys.stderr)
    return recitals, asked


def _no_recitals(tokenizer: Any) -> ToolError | None:
    """Why a template does not allow answers that are given."""
    try:
        templated(Dialogue((user("x"), assistant("x")), "recital"), tokenizer)
    except ToolError as error:
        return error
    return None


def _no_turns(tokenizer: Any) -> ToolError | None:
    """Why a template does not allow further turns."""
    try:
        turns.check(tokenizer)
    except ToolError as error:
        return error
    return None


def _tokenizer(args: argparse.Namespace) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(args.model, revision=args.revision)
    except Exception as error:  # transformers and the hub raise what they like
        raise ToolError(f"cannot load the tokenizer of {args.model}: {error}") from error


def check(args: argparse.Namespace, plan: Plan, config: Any) -> Any:
    """The model's tokenizer, with which the examples of a plan can be made.

    Raises:
        ToolError: there is none that loads; prompts are to be made, and its chat template does not
            allow it; a file of the user's or another run's cannot be read; or there are too few
            examples.
    """
    tokenizer = _tokenizer(args)
    if args.examples:
        # The weights of a hub model may not be here yet, and they are part of its key.
        is_here = Path(args.model).is_dir()
        key = ModelIdentity(args.model, config.to_dict()).key if is_here else None
        _check_count(len(examples_of(Path(args.examples) / FOLDER, plan, key)), plan)
        return tokenizer
    if plan.count and not tokenizer.chat_template:
        raise ToolError(
            f"{args.model} has no chat template, so no prompts can be made: give --prompts with "
            "texts or token ids, and --count 0"
        )
    if plan.num_recitals and (problem := _no_recitals(tokenizer)):
        raise ToolError(
            f"{args.model}: its chat template writes a given answer otherwise than one that is "
            "generated, so there can be no recitals: leave out --recitals"
        ) from problem
    if plan.num_lookups and plan.turns > 1 and (problem := _no_turns(tokenizer)):
        raise ToolError(
            f"{args.model}: its chat template does not allow further turns ({problem}): leave "
            "out --turns"
        ) from problem
    if plan.num_written:
        selfwritten.user_turn_prefix(tokenizer)
        selfwritten.stop_ids(tokenizer)
    given = own_dialogues(plan, tokenizer) if plan.prompts else []
    for ids in given:
        tokens = [*ids.prompt, *(ids.answer or ())]
        if min(tokens) < 0 or max(tokens) >= config.vocab_size:
            raise ToolError(
                f"{plan.prompts} has a prompt with tokens from {min(tokens)} to {max(tokens)}: the "
                f"model's are from 0 to {config.vocab_size - 1}"
            )
    _check_count(plan.count + len(given), plan)
    return tokenizer


def own_dialogues(plan: Plan, tokenizer: Any) -> list[Templated]:
    """The dialogues of a user's file that are short enough, answers included or yet to come.

    Raises:
        ToolError: the file cannot be read, or its dialogues have no template.
    """
    assert plan.prompts is not None
    given = [
        templated(dialogue, tokenizer)
        for dialogue in read(Path(plan.prompts), need_answers=plan.sft)
    ]
    found = []
    for ids in given:
        answer_tokens = plan.answer_tokens if ids.answer is None else len(ids.answer)
        if len(ids.prompt) + answer_tokens <= plan.max_length:
            found.append(ids)
    if len(found) < len(given):
        print(
            f"{len(given) - len(found)} of {len(given)} dialogues are left out: with their answers "
            f"they are longer than --max-length {plan.max_length}",
            file=sys.stderr,
        )
    return found


def answer(args: argparse.Namespace, plan: Plan, tokenizer: Any, directory: Path, key: str) -> None:
    """Writes the examples that are learnt from.

    key: the model's (`model_key`), of its weights too.

    Raises:
        ToolError: there are too few.
    """
    if args.examples:
        found = examples_of(Path(args.examples) / FOLDER, plan, key)
    elif plan.sft:
        given = own_dialogues(plan, tokenizer)
        found = [Example(each.prompt, each.answer or (), "file") for each in given]
        # The first ones are held out, and a file may be sorted.
        random.Random(f"order {plan.seed}").shuffle(found)
    else:
        teacher = Teacher(args.model, args.revision, plan.max_length, args.engine_args)
        try:
            found = examples(plan, teacher, tokenizer)
        finally:
            teacher.close()
    _check_count(len(found), plan)
    facts = {"model_key": key, **asdict(plan)}
    (directory / PLAN).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    packs.write(directory / EXAMPLES, found)


def facts_of(directory: Path, own: bool = False) -> dict[str, Any]:
    """The plan of a run whose prompts are answered, and `model_key`, the key of its model.

    own: whether the run is to be continued, and may then have answers that are not the model's.

    Raises:
        ToolError: there are no answers, or not the model's.
    """
    try:
        if not (directory / EXAMPLES).exists():
            raise FileNotFoundError(f"there is no {EXAMPLES}")
        facts: dict[str, Any] = json.loads((directory / PLAN).read_text(encoding="utf-8"))
        Plan(**{name: value for name, value in facts.items() if name != "model_key"})
        if facts["sft"] and not own:
            raise ToolError(f"{directory} holds given answers, not the model's own: use --sft")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ToolError(f"{directory} holds no answered prompts: {error}") from error
    return facts


def examples_of(directory: Path, plan: Plan, key: str | None) -> list[Example]:
    """What another run of the same model made; its key is not looked at if `key` is None.

    Raises:
        ToolError: it made none, its model was another, or they are longer than the plan's.
    """
    if key is not None and facts_of(directory)["model_key"] != key:
        raise ToolError(f"{directory} holds answers of another model")
    found = packs.read(directory / EXAMPLES)
    longest = max(len(example.prompt) + len(example.answer) for example in found)
    if longest > plan.max_length:
        raise ToolError(
            f"{directory} holds prompts with answers of up to {longest} tokens: use --max-length "
            f"{longest} or more"
        )
    return found


def _check_count(count: int, plan: Plan) -> None:
    if count <= plan.held_out:
        raise ToolError(
            f"{count} examples, of which {plan.held_out} are held out: use a smaller --held-out or "
            "more prompts"
        )
