"""`vllm-kvx evaluate`: what policies keep of a model's answers."""

import argparse
import functools
import json
import platform
import shlex
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

import vllm_kvx
from vllm_kvx.errors import ToolError
from vllm_kvx.policy.cache_dtype import (
    FP8,
    INT8,
    SKIP_LAYERS,
    cache_options,
    dtype_in,
    split_skipped,
    with_skipped,
)
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.records.folder import check_writable
from vllm_kvx.records.model_key import model_name
from vllm_kvx.tools.engine import on_cpu, prepare_environment
from vllm_kvx.tools.evaluate import figures, full_answers, report
from vllm_kvx.tools.evaluate.asking import ask
from vllm_kvx.tools.evaluate.defaults import DEFAULTS, quick_defaults, set_defaults
from vllm_kvx.tools.evaluate.engine import (
    EngineFailed,
    NotStarted,
    OwnEngine,
    Refused,
    own_engine,
)
from vllm_kvx.tools.evaluate.groups import grouped
from vllm_kvx.tools.evaluate.measuring import measures_first
from vllm_kvx.tools.evaluate.original import Model, check_tokenizers, models_of
from vllm_kvx.tools.evaluate.progress import AnswersBar
from vllm_kvx.tools.evaluate.questions import PreparedPrompt, Suite, load_tokenizer
from vllm_kvx.tools.evaluate.rows import FULL_ROW, Row
from vllm_kvx.tools.evaluate.save import save
from vllm_kvx.tools.evaluate.server import RunningServer, running_server
from vllm_kvx.tools.evaluate.store import QuestionId, Store
from vllm_kvx.tools.evaluate.summary import PERPLEXITY, Summary
from vllm_kvx.tools.kv_layers import KVLayers
from vllm_kvx.tools.plots import check_matplotlib
from vllm_kvx.tools.tasks.table import FIXED, GROUPS, TASKS


def run(args: argparse.Namespace) -> None:
    """The command; `args` as in options.py.

    Raises:
        ToolError, PolicyError: it cannot be done as asked.
    """
    if args.tasks == ["list"]:
        print(task_list())
        return
    if not args.quick:
        set_defaults(args, DEFAULTS)
        # Before a configuration is looked for on the hub.
        suite = suite_of(args)
    prepare_environment()
    models = models_of(args)
    if args.quick:
        set_defaults(args, quick_defaults(models[-1].identity.config_key))
        suite = suite_of(args)
    rows = [row for model in models for row in model.rows]
    if args.save:
        check_saves(suite, rows)
    for model in models:
        suite.check(model.text_config.max_position_embeddings)
        check_rows(model.rows)
    check_yardstick({rows[0]: FULL_ROW.over(dtype_in(args.engine_args))}, rows)
    check_skipped(args.engine_args, rows)
    output = Path(args.output or f"evaluate-{Path(args.model).name}")
    check_writable(output, "choose another --output")
    speed = None
    if args.speed:
        check_matplotlib("--speed")
        speed = figures.read_speed(args.speed)
        figures.check_speed(args.speed, speed, rows)
    store = Store(output, facts_of(args, suite, models))

    load = functools.partial(load_tokenizer, args.model, args.revision)
    if args.original is not None:
        check_tokenizers(load(), load_tokenizer(args.original, args.original_revision))
    with _bar("prompts") as bar:
        prepared = suite.prepare(load, bar)
    missing = {row: [each for each in prepared if (row, each) not in store] for row in rows}
    failed: list[ToolError] = []
    if any(missing.values()):
        failed = answer_all(args, suite, models, prepared, missing, store, load)
    problems = finish(args, store, summary_of(store, prepared, rows), models[-1], speed, rows)
    if failed:
        problems.append(
            f"{'; '.join(map(str, failed))}. The report is of what was answered, and that is kept: "
            "with what failed mended, or left out, the same command asks only what is missing"
        )
    if problems:
        raise ToolError(". ".join(problems))


def suite_of(args: argparse.Namespace) -> Suite:
    """The suite of questions that the command's options ask."""
    return Suite.of(
        args.tasks,
        args.longbench,
        args.ruler,
        lengths=tuple(args.lengths),
        samples=args.samples,
        seed=args.seed,
        text=args.text,
        turns=args.turns,
    )


def check_saves(suite: Suite, rows: Sequence[Row]) -> None:
    """Raise ToolError where a run has nothing that `--save` could store."""
    if all(row.is_full for row in rows):
        raise ToolError("--save stores what policies keep of full's answers: name one beside full")
    if not suite.tasks:
        raise ToolError(
            f"--save stores the share of right answers, and {PERPLEXITY} alone has none: add "
            "other --tasks, or leave --save out"
        )


def summary_of(store: Store, questions: Collection[QuestionId], rows: Sequence[Row]) -> Summary:
    """Sums up the answers of these rows to what this run asks; the store may have others."""
    asked = {(row, question) for row in rows for question in questions}
    return Summary((answer for answer in store if answer.key in asked), rows)


def answer_all(
    args: argparse.Namespace,
    suite: Suite,
    models: Sequence[Model],
    prepared: Mapping[QuestionId, PreparedPrompt],
    missing: Mapping[Row, Sequence[QuestionId]],
    store: Store,
    load: Callable[[], Any],
) -> list[ToolError]:
    """Has engines answer what is missing, the yardstick first; returns why rows were passed over.

    load: gives the tokenizer, for second turns.

    Raises:
        ToolError: the yardstick's engine fails, or its answers are too few for a comparison.
    """
    rows = [row for model in models for row in model.rows]
    yardstick, failed = rows[0], list[ToolError]()

    def check_full() -> None:
        summary = summary_of(store, prepared, [yardstick])
        full_answers.check(summary, store.directory, args.keep_going, args.save)

    if not missing[yardstick]:
        # Before an engine starts for the others.
        check_full()
    prompts = {row: [prepared[each].prompt for each in left] for row, left in missing.items()}
    ahead = max(policy.lookahead for model in models for policy in model.rows.values())
    context = suite.context(prepared, ahead)
    with closing(AnswersBar(prompts)) as bar:
        engines = engines_of(args, models, missing, context, failed, bar)
        with closing(engines):
            for engine, members in engines:
                for row in members:
                    store.note_resolved(row, engine.resolved(row))
                check_yardstick(store.resolved, rows)
                for index, row in enumerate(members):
                    try:
                        ask(engine, row, missing[row], prepared, store, bar, load)
                    except (Refused, EngineFailed) as error:
                        if row == yardstick:
                            raise
                        failed.append(error)
                        if isinstance(error, EngineFailed):
                            bar.drop(members[index:])
                            break
                        bar.drop([row])
                    if row == yardstick and missing[row]:
                        bar.clear()
                        check_full()
    return failed


def finish(
    args: argparse.Namespace,
    store: Store,
    summary: Summary,
    model: Model,
    speed: Mapping[str, Mapping[str, float]] | None,
    rows: Sequence[Row],
) -> list[str]:
    """Shows and writes what the answers say; they are saved for `model`.

    rows: all that were asked for, answered or not. Returns what could not be done.
    """
    facts = store.facts
    layers = KVLayers.of(model.text_config)
    print(report.table(summary, layers))
    written = {
        "report.json": json.dumps(report.as_json(summary, facts, layers), indent=1) + "\n",
        "report.txt": report.text(summary, layers),
    }
    for name, text in written.items():
        try:
            (store.directory / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ToolError(f"cannot write {store.directory / name}: {error.strerror}") from error
    print(f"\nResults: {store.directory / 'report.json'}, answers: {store.directory}/answers.jsonl")
    problems = _save(model, summary, facts, rows) if args.save else []
    if not args.no_plot:
        print(figures.draw_all(store.directory, summary, model_name(args.model), speed))
    return problems


def _save(
    model: Model, summary: Summary, facts: Mapping[str, Any], rows: Sequence[Row]
) -> list[str]:
    """Saves rows and says of each what became of it; returns what could not be saved."""
    # Its weights may have come with this run.
    saved = save(model.identity.key, summary, facts, rows)
    if saved.path is None:
        print("Nothing was saved for servers of this model.")
    else:
        names = ", ".join(map(str, saved.names))
        print(f"Saved for servers of this model: {names}, in {saved.path}")
    for row, why in {**saved.needless, **saved.refused}.items():
        print(f"Not saved: {row}, {why}")
    refused = "; ".join(f"{row}, {why}" for row, why in saved.refused.items())
    return [f"--save could not save {refused}"] if refused else []


def check_rows(rows: Mapping[Row, KVPolicy]) -> None:
    """Raise ToolError for rows that no engine on this machine can answer."""
    for row, policy in rows.items():
        dtype = row.cache_dtype
        if dtype is None or not on_cpu():
            continue
        quantized, skipped = split_skipped(dtype)
        if quantized == INT8 and policy.retrieve is not None and not skipped:
            continue  # By attention of our own.
        if quantized not in FP8:
            why = "vLLM's CPU attention has no such KV cache"
        elif policy.is_lossy_decode:
            why = "retention and retrieval cannot address 8-bit keys on CPU"
        else:
            continue
        raise ToolError(f"{row}: {why}: ask on a GPU, or leave @{dtype} out")


def check_yardstick(resolved: Mapping[Row, Row], rows: Sequence[Row]) -> None:
    """Raise ToolError where rows name a KV cache dtype and `full` is over a quantized one, too.

    resolved: by row, as the store has it. rows: the yardstick first.
    """
    dtype = resolved.get(rows[0], FULL_ROW).cache_dtype
    named = next((row for row in rows if row.cache_dtype), None)
    if dtype and named:
        raise ToolError(
            f"{named} would be compared with full over {dtype}, and what {dtype} loses would not "
            f"show: leave @{named.cache_dtype} out, or give full another KV cache by --engine-args "
            '\'{"kv_cache_dtype": "bfloat16"}\''
        )


def check_skipped(engine_args: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Raise ToolError where rows name a KV cache dtype and options name layers that skip one.

    Such options could be about nothing but these rows, whose names say which layers skip theirs.
    """
    named = next((row for row in rows if row.cache_dtype), None)
    if named is None or not (skipped := engine_args.get(SKIP_LAYERS)):
        return
    raise ToolError(
        f"{named} says by its name which layers skip its KV cache, and {SKIP_LAYERS} in "
        "--engine-args names others: leave that out, and name them in a policy, "
        f"full@{with_skipped('fp8', map(str, skipped))}"
    )


def facts_of(args: argparse.Namespace, suite: Suite, models: Sequence[Model]) -> dict[str, Any]:
    """What the run is: models, questions, versions, machine and date."""
    import torch
    import transformers
    import vllm

    *others, model = models
    original = others[0] if others else None
    dtype = args.engine_args.get("dtype", "float32" if on_cpu() else "auto")
    return {
        "model": model.name,
        "model_key": model.key,
        "config_key": model.identity.config_key,
        "original": original and original.name,
        "original_key": original and original.key,
        "original_config_key": original and original.identity.config_key,
        "text": args.text and str(Path(args.text).resolve()),
        "kv_cache_dtype": dtype_in(args.engine_args),
        "quantization": args.engine_args.get("quantization"),
        "seed": args.seed,
        "dtype": dtype,
        "tasks": suite.names,
        "lengths": args.lengths,
        "samples": args.samples,
        "turns": args.turns,
        "engine_args": args.engine_args,
        "base_url": args.base_url,
        "command": shlex.join(["vllm-kvx", *sys.argv[1:]]),
        "versions": {
            "vllm_kvx": vllm_kvx.__version__,
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "device": platform.machine() if on_cpu() else torch.cuda.get_device_name(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def engines_of(
    args: argparse.Namespace,
    models: Sequence[Model],
    missing: Mapping[Row, Sequence[QuestionId]],
    context: int,
    failed: list[ToolError],
    bar: AnswersBar,
) -> Generator[tuple[OwnEngine | RunningServer, list[Row]]]:
    """Engines that are up, with the rows to ask them for, one after the other.

    context: tokens that the longest prompt has with its answer. failed: takes why an engine does
    not start, whose rows are passed over. bar: is told of each that starts.

    Raises:
        NotStarted: it is the yardstick's engine.
    """
    yardstick = next(iter(models[0].rows))
    if args.base_url:
        (model,) = models
        # It is asked what `full` means there, even if all such answers are here.
        wanted = {row: p for row, p in model.rows.items() if missing[row] or row == FULL_ROW}
        with running_server(args.base_url, wanted, args.concurrency, model.key) as server:
            yield server, list(wanted)
        return
    groups = []
    for model in models:
        wanted = {row: policy for row, policy in model.rows.items() if missing[row]}
        groups += [(model, rows) for rows in grouped(wanted, model.text_config.num_hidden_layers)]
    for left, (model, rows) in zip(range(len(groups), 0, -1), groups, strict=True):
        longest = min(context, model.text_config.max_position_embeddings)
        options = {"max_model_len": longest, "revision": model.revision}
        if args.turns > 1:
            # Who asks again finds the text in the prefix cache.
            options["enable_prefix_caching"] = True
        options |= args.engine_args
        members = {row: model.rows[row] for row in rows}
        cache = {} if (dtype := rows[0].cache_dtype) is None else cache_options(dtype)
        try:
            with ExitStack() as stack:
                with bar.starting(rows, left, measures_first(model, members.values())):
                    engine = stack.enter_context(own_engine(model.source, members, options | cache))
                yield engine, rows
        except NotStarted as error:
            if yardstick in rows:
                raise
            failed.append(error)
            bar.drop(rows)


def task_list() -> str:
    """Tasks with what they are, and groups."""
    lines = [f"{name:18}{task.about}" for name, task in (TASKS | FIXED).items()]
    lines.append("perplexity        held-out text under the policy's cache, in nats a token")
    lines.append(
        "ruler_FILE        a file of RULER's own prompts, in the folder that --ruler names"
    )
    lines += [f"{name:18}{', '.join(members)}" for name, members in GROUPS.items()]
    lines.append("ruler_files       all files of that folder")
    return "\n".join(lines)


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr; gives what sets it to so many of so many."""
    with tqdm(unit=f" {what}", dynamic_ncols=True) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
