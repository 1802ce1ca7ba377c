"""`vllm-kvx recommend`: which policy gains most of those that keep a model's answers."""

import argparse
import functools
import hashlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import vllm_kvx
from vllm_kvx.errors import ToolError
from vllm_kvx.policy.axes import Method
from vllm_kvx.policy.cache_dtype import dtype_in
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.spec import servable
from vllm_kvx.records import recommendation as records
from vllm_kvx.records.folder import cache_problem, check_writable
from vllm_kvx.records.model_key import ModelIdentity, architecture_of, model_name
from vllm_kvx.records.tuned_weights import read as read_tuned
from vllm_kvx.server.measured_layers import layer_of
from vllm_kvx.server.start_checks import HEAD_DIMS
from vllm_kvx.tools.checkpoint.loading import load_config
from vllm_kvx.tools.doctor.model_limits import (
    BESIDE_WINDOWS,
    FULL_ALONE,
    NO_POLICY,
    limits_of,
)
from vllm_kvx.tools.doctor.weights import quantized_bytes
from vllm_kvx.tools.engine import on_cpu, prepare_environment
from vllm_kvx.tools.evaluate.engine import NotStarted, own_engine
from vllm_kvx.tools.evaluate.groups import grouped
from vllm_kvx.tools.evaluate.questions import Suite, load_tokenizer
from vllm_kvx.tools.evaluate.rows import FULL_ROW, Row
from vllm_kvx.tools.evaluate.store import Store
from vllm_kvx.tools.ideal.work import full_work, mean_entry_bytes, prefill_flops, with_windows
from vllm_kvx.tools.recommend import report
from vllm_kvx.tools.recommend.defaults import (
    CORE_FLOPS,
    FIRST,
    FIRST_ON_CPU,
    INPUT,
    ON_CPU_MINUTES,
    STEP_ON_CPU,
    TASKS,
    TASKS_ON_CPU,
)
from vllm_kvx.tools.recommend.gains import Server, Workload, gains_of, server_of
from vllm_kvx.tools.recommend.ladder import (
    Candidate,
    LeftOut,
    ModelFacts,
    candidates,
    names_for,
)
from vllm_kvx.tools.recommend.questions import Questions
from vllm_kvx.tools.recommend.rounds import Clock, Rounds
from vllm_kvx.tools.recommend.stopping import least_questions, questions_of
from vllm_kvx.tools.tasks.own_prompts import OwnPrompts


def run(args: argparse.Namespace) -> None:
    """The command; `args` as in options.py.

    Raises:
        ToolError, PolicyError: it cannot be done as asked.
    """
    first = FIRST_ON_CPU if on_cpu() else FIRST
    most = questions_of(args.keep, args.samples, first)
    own = OwnPrompts(Path(args.prompts)) if args.prompts else None
    clock = Clock(args.time_limit or (ON_CPU_MINUTES if on_cpu() else None))
    prepare_environment()
    text_config = load_config(args.model, args.revision, supported=None).to_dict()
    identity = ModelIdentity(args.model, text_config, args.revision)
    results = Path(args.results or f"recommend-{Path(args.model).name}")
    check_writable(results, "choose another --results")
    if not args.no_save and (problem := cache_problem(records.FOLDER)):
        raise ToolError(f"{problem}, or give --no-save")

    if not (context := text_config.get("max_position_embeddings")):
        raise ToolError("the model's configuration does not say how long its context is")
    suite = suite_of(args, own, context)
    load = functools.partial(load_tokenizer, args.model, args.revision)
    questions = Questions(suite, most, load, first)
    if questions.count < (least := least_questions(args.keep, questions.rounds)):
        raise ToolError(
            f"{questions.count} prompts are too few: even a policy that keeps every answer is not "
            f"shown to keep {args.keep:.1%} by fewer than {least} right ones: give more prompts, "
            "or a lower --keep"
        )
    if questions.context() > context:
        raise ToolError(
            f"the longest prompt and its answer take {questions.context()} tokens, and the model's "
            f"context has {context}: leave that prompt out"
        )
    workload = Workload(args.input or questions.median, args.output, args.concurrency)
    facts = model_facts(identity, text_config, dtype_in(args.engine_args))
    server = server_for(args, text_config, facts.head_dim)
    names, left_out = (args.policies, []) if args.policies else names_for(facts)
    longest = suite.longest_answer, questions.longest_prompt
    ladder, more = candidates(names, facts, *longest, lambda name: gains_of(name, workload, server))
    left_out += more
    for each in left_out:
        say(f"left out: {each.policy}: {each.why}")
    if not ladder:
        raise ToolError(
            f"no policy of the ladder runs on this model and gains anything for {workload}: serve "
            "it in full, or name other --policies or a longer --input"
        )
    check_time(clock, questions, server)

    store = Store(results, facts_of(args, identity, suite, workload))
    rounds = Rounds(ladder, questions, store, args.keep, clock, load, say)
    left_out += ask_all(args, rounds, facts.layers)
    shown = report.text(rounds, args.keep, workload, server.says, left_out)
    saved = None if args.no_save else save(rounds, store, args.keep, workload, server, identity)
    closing = report.advice(rounds, args.model, args.keep, saved is not None)
    print(f"{shown}\n\n{closing}")
    if saved is not None:
        print(f"Saved for servers with --kv-policy auto: {saved}")
    write(results, f"{shown}\n\n{closing}\n", report.as_json(rounds, store.facts, left_out))


def say(line: str) -> None:
    """Tells how far the run is."""
    print(line, file=sys.stderr, flush=True)


def suite_of(args: argparse.Namespace, own: OwnPrompts | None, context: int) -> Suite:
    """What is asked.

    Raises:
        ToolError: it does not go together, or does not fit the model.
    """
    if own is not None:
        if args.tasks:
            raise ToolError("--prompts and --tasks both say what is asked: leave one of them out")
        return Suite((), (own,), False, (args.input or INPUT,), None, args.seed)
    tasks = args.tasks or (TASKS_ON_CPU if on_cpu() else TASKS)
    suite = Suite.of(tasks, None, lengths=(1,), samples=None, seed=args.seed)
    if suite.perplexity or (suite.generated and suite.fixed):
        raise ToolError(
            "--tasks: name tasks that are generated to a length, or data sets, and no perplexity: "
            "answers of one run are compared with each other"
        )
    room = context - suite.longest_answer
    length = args.input or min(INPUT, room)
    if length > room:
        raise ToolError(
            f"--input {length}: with {suite.longest_answer} tokens of an answer that is more than "
            f"the model's context of {context}: use --input up to {room}"
        )
    return replace(suite, lengths=(length,))


def model_facts(
    identity: ModelIdentity, text_config: Mapping[str, Any], kv_cache_dtype: str | None = None
) -> ModelFacts:
    """What decides which policies a model can run.

    Raises:
        ToolError: it runs none but `full`.
    """
    limits = []
    for limit in limits_of(str(architecture_of(text_config)), text_config):
        if limit.remain in (FULL_ALONE, NO_POLICY):
            raise ToolError(f"this model runs {limit.remain}: {limit.reason}")
        # What is beside windows is asked of each policy.
        if limit.remain != BESIDE_WINDOWS:
            limits.append((limit.reason, True))
    count = int(text_config["num_hidden_layers"])

    def with_layer(part: Method) -> Method | None:
        wanted, found = part.to_measure, layer_of(part, identity, count)
        if wanted is None or found is None:
            return None
        return replace(part, **found.values(wanted))

    tuned = read_tuned(identity.directory) if identity.directory is not None else None
    of_weights = None if tuned is None else tuned.policy
    return ModelFacts(text_config, limits, HEAD_DIMS, with_layer, of_weights, kv_cache_dtype)


def server_for(args: argparse.Namespace, text_config: Mapping[str, Any], head_dim: int) -> Server:
    """What gains are counted for.

    Raises:
        ToolError: it cannot be told, or gains over such a KV cache are not known.
    """
    import torch

    here = None if on_cpu() else torch.cuda.get_device_name()
    weights = quantized_bytes(text_config) if text_config.get("quantization_config") else 2.0
    dtype = dtype_in(args.engine_args)
    if (kv := mean_entry_bytes(dtype, text_config["num_hidden_layers"], head_dim)) is None:
        raise ToolError(f"gains over a KV cache of {dtype} cannot be counted: leave it out")
    return server_of(text_config, args.device, here, weights, kv)


def check_time(clock: Clock, questions: Questions, server: Server) -> None:
    """Raise ToolError where a CPU cannot answer a first round in time, at its very best.

    Only prompts in full are counted, by the most that its cores could multiply.
    """
    if not on_cpu() or clock.minutes is None:
        return
    shape, length = server.shape, questions.median
    work = with_windows(full_work(shape.full_layers, length), shape, length)
    flops = prefill_flops(shape, work)
    least = questions.first * flops / ((os.cpu_count() or 1) * CORE_FLOPS) / 60
    if least > clock.minutes:
        raise ToolError(
            f"there is no GPU here, and {questions.first} prompts of {length:,} tokens take this "
            f"CPU {least:,.1f} minutes at the least, in full alone: run it on a GPU, or use a "
            f"shorter --input, or a longer --time-limit than {clock.minutes:g}"
        )


def ask_all(args: argparse.Namespace, rounds: Rounds, layers: int) -> list[LeftOut]:
    """Starts engines, as few as have room for the candidates, and has them answer.

    Returns candidates whose engine did not start.

    Raises:
        ToolError: no engine starts, or one fails.
    """
    by_row = {Row(each.candidate.name): each.candidate for each in rounds.standings}
    groups = grouped({row: each.policy for row, each in by_row.items()}, layers)
    ahead = max(each.candidate.policy.lookahead for each in rounds.standings)
    options = {"max_model_len": rounds.questions.context(ahead), "revision": args.revision}
    if on_cpu():
        # Short steps: between two of them the clock is looked at, and vLLM gives up a step that
        # takes five minutes.
        options["max_num_batched_tokens"] = STEP_ON_CPU
    failed: list[LeftOut] = []
    problem: NotStarted | None = None
    for rows in groups:
        members: Sequence[Candidate] = [by_row[row] for row in rows]
        if rounds.out_of_time or not rounds.open(members):
            continue
        if rounds.clock.is_over:
            rounds.out_of_time = True
            break
        wanted = [each.candidate for each in rounds.open(members)]
        policies = {FULL_ROW: KVPolicy(), **{Row(each.name): each.policy for each in wanted}}
        say(f"starting an engine for full, {', '.join(each.name for each in wanted)}")
        try:
            with own_engine(args.model, policies, {**options, **args.engine_args}) as engine:
                rounds.ask(engine, wanted)
        except NotStarted as error:
            problem = error
            failed += [LeftOut(each.name, str(error)) for each in wanted]
    if all(each.share is None for each in rounds.standings):
        raise problem or ToolError(
            f"--time-limit {rounds.clock.minutes:g}: the time was over before an engine started: "
            "give it more"
        )
    return failed


def facts_of(
    args: argparse.Namespace, identity: ModelIdentity, suite: Suite, workload: Workload
) -> dict[str, Any]:
    """What the run is: for its results, and to tell whether answers are of the same run."""
    import torch
    import transformers
    import vllm

    packages = {
        "vllm_kvx": vllm_kvx.__version__,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return {
        "model": model_name(args.model),
        "model_key": identity.key,
        "config_key": identity.config_key,
        # Whose prompts: answers to other ones are not of the same run.
        "text": args.prompts and text_of(Path(args.prompts)),
        "kv_cache_dtype": dtype_in(args.engine_args),
        "quantization": args.engine_args.get("quantization"),
        "seed": args.seed,
        "dtype": args.engine_args.get("dtype", "float32" if on_cpu() else "auto"),
        "tasks": suite.names,
        "keep": args.keep,
        "workload": asdict(workload),
        "engine_args": args.engine_args,
        "command": shlex.join(["vllm-kvx", *sys.argv[1:]]),
        "versions": packages,
        "machine": platform.machine() if on_cpu() else torch.cuda.get_device_name(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def text_of(path: Path) -> str:
    """A file by name and content: answers to the prompts of an earlier one are not of this run."""
    return f"{path.resolve()}#{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def save(
    rounds: Rounds,
    store: Store,
    keep: float,
    workload: Workload,
    server: Server,
    identity: ModelIdentity,
) -> Path | None:
    """Stores what was found for servers of the model; returns the record's file.

    None where an earlier run has found a policy and this one has not: that record stays.

    Raises:
        ToolError: it cannot be written.
    """
    facts, best = store.facts, rounds.best
    rows = [
        records.Row(
            # As it was named: an engine that is asked retrieves whether or not that pays.
            policy=servable(each.candidate.policy),
            kept=(share.value, share.low, share.high),
            n=each.asked,
            right=round(each.right, 4),
            gains=each.candidate.gains.as_json(),
            verdict=str(each.verdict),
        )
        for each in rounds.standings
        if (share := each.share) is not None
    ]
    record = records.Recommendation(
        # Its weights may have come with this run.
        key=identity.key,
        model=facts["model"],
        keep=keep,
        workload=asdict(workload),
        device=server.device.name,
        kv_cache_dtype=store.resolved[FULL_ROW].cache_dtype or "",
        tasks=facts["tasks"],
        rows=rows,
        chosen=None if best is None else servable(best.policy),
        level=rounds.level,
        versions=facts["versions"],
        command=facts["command"],
        date=facts["date"],
    )
    if record.chosen is None:
        before = records.load(record.key, record.kv_cache_dtype)
        if before is not None and before.chosen is not None:
            say(
                f"not saved: an earlier run ({before.date[:10]}) found {before.chosen}, which "
                f"stays: delete {records.record_path(record.key, record.kv_cache_dtype)} to have "
                "it forgotten"
            )
            return None
    return records.save(record)


def write(directory: Path, text: str, found: Mapping[str, Any]) -> None:
    """Writes a run's report beside its answers.

    Raises:
        ToolError: it cannot be written.
    """
    for name, content in (("report.txt", text), ("report.json", json.dumps(found, indent=1))):
        try:
            (directory / name).write_text(content + "\n", encoding="utf-8")
        except OSError as error:
            raise ToolError(f"cannot write {directory / name}: {error.strerror}") from error
    print(f"Results: {directory / 'report.json'}, answers: {directory}/answers.jsonl")
