"""`vllm-kvx evaluate`: what policies keep of a model's answers."""

import argparse
import functools
import json
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

import vllm_kvx
from vllm_kvx.cache_folder import check_writable
from vllm_kvx.calibration.model_key import model_dir, model_key
from vllm_kvx.calibration.report import model_name
from vllm_kvx.errors import ToolError
from vllm_kvx.evaluation import figures, records, report
from vllm_kvx.evaluation.engine import (
    NotStarted,
    OwnEngine,
    on_cpu,
    own_engine,
    prepare_environment,
)
from vllm_kvx.evaluation.groups import grouped
from vllm_kvx.evaluation.original import Model, check_tokenizers, models_of
from vllm_kvx.evaluation.questions import Key, Posed, Suite, load_tokenizer
from vllm_kvx.evaluation.rows import FULL, dtype_of
from vllm_kvx.evaluation.server import RunningServer, running_server
from vllm_kvx.evaluation.store import RESOLVED, Answer, Question, Store
from vllm_kvx.evaluation.summary import Summary
from vllm_kvx.evaluation.tasks.table import FIXED, GROUPS, TASKS
from vllm_kvx.policy.cache_dtype import FP8, at_dtype, split_dtype
from vllm_kvx.policy.policy import KVPolicy

# Prompts, and their tokens on a GPU and on a CPU, that are asked for and stored at a time.
_AT_A_TIME = 128
_TOKENS_AT_A_TIME, _TOKENS_ON_CPU = 1 << 20, 1 << 14


def run(args: argparse.Namespace) -> None:
    """The command; `args` as in options.py.

    Raises:
        ToolError, PolicyError: it cannot be done as asked.
    """
    if args.tasks == ["list"]:
        print(task_list())
        return
    suite = Suite.of(
        args.tasks,
        args.longbench,
        lengths=tuple(args.lengths),
        samples=args.samples,
        seed=args.seed,
        text=args.text,
    )
    prepare_environment()
    models = models_of(args)
    rows = [row for model in models for row in model.rows]
    for model in models:
        suite.check(model.config.max_position_embeddings)
        check_rows(model.rows)
    check_yardstick({rows[0]: FULL + at_dtype(args.engine_args.get("kv_cache_dtype"))}, rows)
    output = Path(args.output or f"evaluate-{Path(args.model).name}")
    check_writable(output, "choose another --output")
    speed = figures.read_speed(args.speed) if args.speed else None
    store = Store(output, facts_of(args, suite, models))

    load = functools.partial(load_tokenizer, args.model, args.revision)
    if args.original is not None:
        check_tokenizers(load(), load_tokenizer(args.original, args.original_revision))
    with _bar("prompts") as bar:
        posed = suite.pose(load, bar)
    missing = {row: [key for key in posed if Question(row, *key) not in store] for row in rows}
    count = sum(map(len, missing.values()))
    failed: list[NotStarted] = []
    if count:
        done = 0
        with _bar("answers") as bar:
            bar(0, count)
            context = suite.context(posed)
            for engine, names in engines_of(args, models, missing, context, failed):
                for name in names:
                    store.note_resolved(name, engine.resolved(name))
                check_yardstick(store.facts[RESOLVED], rows)
                for name in names:
                    for answered in _ask(engine, name, missing[name], posed, store):
                        done += answered
                        bar(done, count)
    asked = {Question(row, *key) for row in rows for key in posed}
    summary = Summary((a for a in store if a.question in asked), rows)
    finish(args, store, summary, models[-1], speed)
    if failed:
        reasons = "; ".join(map(str, failed))
        raise ToolError(
            f"{reasons}. The report is of what was answered, and that is kept: with what failed "
            "mended, or left out, the same command asks only what is missing"
        )


def finish(
    args: argparse.Namespace,
    store: Store,
    summary: Summary,
    model: Model,
    speed: Mapping[str, Mapping[str, float]] | None,
) -> None:
    """Shows and writes what the answers say; they are saved for `model`."""
    facts = store.facts
    print(report.table(summary))
    written = {
        "report.json": json.dumps(report.as_json(summary, facts), indent=1) + "\n",
        "report.txt": report.text(summary),
    }
    for name, text in written.items():
        try:
            (store.directory / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ToolError(f"cannot write {store.directory / name}: {error.strerror}") from error
    print(f"\nResults: {store.directory / 'report.json'}, answers: {store.directory}/answers.jsonl")
    if args.save:
        # Its weights may have come with this run.
        key = model_key(model.config.to_dict(), model_dir(model.source, model.revision))
        path, others = records.save(key, summary, facts)
        print(f"Saved for servers of this model: {path}")
        for row, why in others.items():
            print(f"Not saved: {row}, {why}")
    if not args.no_plot:
        print(figures.draw_all(store.directory, summary, model_name(args.model), speed))


def check_rows(rows: Mapping[str, KVPolicy]) -> None:
    """Raise ToolError for rows that no engine on this machine can answer."""
    for row, policy in rows.items():
        dtype = dtype_of(row)
        if dtype is None or not on_cpu():
            continue
        if dtype not in FP8:
            why = "vLLM's CPU attention has no such KV cache"
        elif policy.is_lossy_decode:
            why = "retention and retrieval cannot address 8-bit keys on CPU"
        else:
            continue
        raise ToolError(f"{row}: {why}: ask on a GPU, or leave @{dtype} out")


def check_yardstick(resolved: Mapping[str, str], rows: Sequence[str]) -> None:
    """Raise ToolError where rows name a KV cache dtype and `full` is over a quantized one, too.

    resolved: by row, as the store has it. rows: the yardstick first.
    """
    dtype = split_dtype(resolved.get(rows[0], FULL))[1]
    named = next((row for row in rows if dtype_of(row)), None)
    if dtype and named:
        raise ToolError(
            f"{named} would be compared with full over {dtype}, and what {dtype} loses would not "
            f"show: leave @{dtype_of(named)} out, or give full another KV cache by --engine-args "
            '\'{"kv_cache_dtype": "bfloat16"}\''
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
        "config_key": model.config_key,
        "original": original and original.name,
        "original_key": original and original.key,
        "original_config_key": original and original.config_key,
        "text": args.text and str(Path(args.text).resolve()),
        "kv_cache_dtype": args.engine_args.get("kv_cache_dtype"),
        "quantization": args.engine_args.get("quantization"),
        "seed": args.seed,
        "dtype": dtype,
        "tasks": suite.names,
        "lengths": args.lengths,
        "samples": args.samples,
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
    missing: Mapping[str, Sequence[Key]],
    context: int,
    failed: list[NotStarted],
) -> Iterator[tuple[OwnEngine | RunningServer, list[str]]]:
    """Engines that are up, with the rows to ask them for, one after the other.

    context: tokens that the longest prompt has with its answer. failed: takes why an engine does
    not start, whose rows are passed over.

    Raises:
        NotStarted: it is the yardstick's engine.
    """
    yardstick = next(iter(models[0].rows))
    for model in models:
        wanted = {row: policy for row, policy in model.rows.items() if missing[row]}
        if args.base_url:
            # It is asked what `full` means there, even if all such answers are here.
            wanted = {FULL: model.rows[FULL], **wanted}
            with running_server(args.base_url, wanted, args.concurrency, model.key) as server:
                yield server, list(wanted)
            continue
        longest = min(context, model.config.max_position_embeddings)
        options = {"max_model_len": longest, "revision": model.revision, **args.engine_args}
        for names in grouped(wanted, model.config.num_hidden_layers):
            members = {name: wanted[name] for name in names}
            cache = {} if (dtype := dtype_of(names[0])) is None else {"kv_cache_dtype": dtype}
            try:
                with own_engine(model.source, members, options | cache) as engine:
                    yield engine, names
            except NotStarted as error:
                if yardstick in names:
                    raise
                failed.append(error)


def _ask(
    engine: OwnEngine | RunningServer,
    policy: str,
    keys: Sequence[Key],
    posed: Mapping[Key, Posed],
    store: Store,
) -> Iterator[int]:
    """Has the engine answer, shortest prompts first; how many answers are stored, as they are."""
    ordered = sorted(keys, key=lambda key: key[1])
    # A server may have a GPU where this machine has none.
    slow = isinstance(engine, OwnEngine) and on_cpu()
    most = _TOKENS_ON_CPU if slow else _TOKENS_AT_A_TIME
    while ordered:
        tokens, count = 0, 0
        while count < min(len(ordered), _AT_A_TIME) and (tokens < most or not count):
            tokens += len(posed[ordered[count]].asked.token_ids)
            count += 1
        some, ordered = ordered[:count], ordered[count:]
        answers = engine.answers(policy, [posed[key].asked for key in some])
        found = []
        for key, answer in zip(some, answers, strict=True):
            length = len(posed[key].asked.token_ids)
            shares = engine.shares(policy, length)
            score = posed[key].score(answer.text, answer.nats)
            found.append(
                Answer(Question(policy, *key), score, length, shares.kept, shares.read, answer.text)
            )
        store.add(found)
        yield len(found)


def task_list() -> str:
    """Tasks with what they are, and groups."""
    lines = [f"{name:18}{task.about}" for name, task in (TASKS | FIXED).items()]
    lines.append("perplexity        held-out text under the policy's cache, in nats a token")
    lines += [f"{name:18}{', '.join(members)}" for name, members in GROUPS.items()]
    return "\n".join(lines)


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr; gives what sets it to so many of so many."""
    with tqdm(unit=f" {what}", dynamic_ncols=True) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
