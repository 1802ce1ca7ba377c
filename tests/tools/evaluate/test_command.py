"""`vllm-kvx evaluate` from its command line to its report, on a real engine."""

import gc
import json
import shutil
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.engine import HAS_FP8, keep_in_process
from support.models import LOOKUP
from transformers import AutoTokenizer

from vllm_kvx.cli import main
from vllm_kvx.errors import ToolError
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.records import evaluation as records
from vllm_kvx.records.model_key import model_key
from vllm_kvx.tools.checkpoint.loading import load_config
from vllm_kvx.tools.evaluate import command, perplexity
from vllm_kvx.tools.evaluate.engine import Answered, NotStarted, Prompt
from vllm_kvx.tools.evaluate.groups import read_policies
from vllm_kvx.tools.evaluate.original import Model
from vllm_kvx.tools.evaluate.progress import AnswersBar
from vllm_kvx.tools.evaluate.rows import Row
from vllm_kvx.tools.evaluate.shares import Shares
from vllm_kvx.tools.evaluate.store import QuestionId, Store

SMALL = {"kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 512}


def evaluate(output: Path, *more: str) -> int:
    fixed = ["evaluate", str(LOOKUP), "--tasks", "notes_3,perplexity", "--lengths", "320"]
    fixed += ["--samples", "2", "--output", str(output), "--no-plot"]
    fixed += ["--engine-args", json.dumps(SMALL)]
    return main([*fixed, *more])


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keep_in_process(monkeypatch)
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "cache"))


def test_policies_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    # An interpreted token takes a tenth of a second.
    monkeypatch.setattr(perplexity, "CONTINUATION_TOKENS", 8)
    output = tmp_path / "out"
    over_fp8 = ("full@fp8",) if HAS_FP8 else ()
    policies = (
        "--policies",
        "snapkv:kv_rate=0.1,kv_floor=0",
        "streamingllm:sinks=1,recent=9",
        *over_fp8,
    )
    assert evaluate(output, *policies, "--save") == 0
    cleanup_dist_env_and_memory()
    gc.collect()
    shown = capsys.readouterr().out
    written = json.loads((output / "report.json").read_text())
    cells = {(c["policy"], c["task"]): c for c in written["cells"] if c["length"] == 320}
    assert cells["full", "notes_3"]["score"][0] == 1.0 and cells["full", "notes_3"]["n"] == 2
    assert cells["snapkv:kv_rate=0.1,kv_floor=0", "notes_3"]["score"][0] == 1.0
    # The first word comes with the prompt, and the others are gone.
    lost = cells[policies[2], "notes_3"]
    assert lost["score"][0] < 0.5 and lost["kept"] < 0.04 and lost["of_full"][0] < 0.5
    # Forced text is the same under every policy, and less likely the less of the prompt is kept.
    nats = [cells[name, "perplexity"]["score"][0] for name in ("full", *policies[1:])]
    assert nats[0] > 0 and nats[1] != nats[0] != nats[2]
    for name in over_fp8:
        # Nothing of it is gone, and all of it is rounded.
        assert nats[3] not in nats[:3] and cells[name, "notes_3"]["kept"] == 1.0
    assert "Held-out text" in shown and "of full" in shown

    # What is answered is not asked again, and another policy's record is not there.
    monkeypatch.setattr(command, "own_engine", None)
    assert evaluate(output, *policies) == 0
    again = capsys.readouterr().out
    assert again[: again.index("Results:")] in shown

    # An engine that does not start costs the others nothing.
    monkeypatch.setattr(command, "own_engine", does_not_start)
    more = [f"streamingllm:sinks=1,recent={recent}" for recent in (10, 11)]
    assert evaluate(output, *policies, more[0], *over_fp8, more[1]) == 2
    out, err = capsys.readouterr()
    # What full has right is said before more is asked.
    assert out.startswith("full: 100.0% [34-100] of 2 answers right\n")
    assert out[out.index("policy ") : out.index("Results:")] in shown
    assert f"the engine for {', '.join(more)} does not start: no memory. The report is of" in err
    config = json.loads((LOOKUP / "config.json").read_text())
    key = written["model_key"]
    assert key != model_key(config, None)
    found = records.load(key, parse_policy("snapkv:kv_rate=0.1,kv_floor=0"))
    assert found is not None and found["of_full"][0] == 1.0 and found["n"] == 2
    assert records.load(key, parse_policy("snapkv:kv_rate=0.3")) is None
    assert (records.load(key, parse_policy("full"), "fp8") is not None) == HAS_FP8
    assert records.load(key, parse_policy("snapkv:kv_rate=0.1,kv_floor=0"), "fp8") is None


@contextmanager
def does_not_start(model: str, policies: Iterable[Row], options: object) -> Iterator[None]:
    raise NotStarted(f"the engine for {', '.join(map(str, policies))} does not start: no memory")
    yield


class OverFp8:
    """An engine of a checkpoint that brings an fp8 KV cache of its own; it answers nothing."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)

    def resolved(self, row: Row) -> Row:
        return Row(row.policy, "fp8")


def test_full_over_a_quantized_kv_cache_is_no_yardstick_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def engine(model: str, policies: Iterable[Row], options: object) -> Iterator[OverFp8]:
        yield OverFp8(policies)

    monkeypatch.setattr(command, "own_engine", engine)
    assert evaluate(tmp_path / "out", "--policies", "full@fp8") == 2
    assert "full@fp8 would be compared with full over fp8" in capsys.readouterr().err
    # What it says can be done in the same place.
    assert not Store(tmp_path / "out", {"model": "any"}).facts["resolved"]


class Wrong:
    """An engine whose answers are all wrong but for the rows that are named."""

    def __init__(self, right: Iterable[str] = ()) -> None:
        self.right, self.asked = set(right), list[str]()

    def resolved(self, row: Row) -> Row:
        return row

    def shares(self, row: Row, prompt_len: int, generated: int) -> Shares:
        return Shares(0.5, 0.5, 1.0)

    def answers(self, row: Row, prompts: Sequence[Prompt], *progress: object) -> list[Answered]:
        self.asked.append(str(row))
        tokenizer = AutoTokenizer.from_pretrained(LOOKUP)
        # The task takes any answer that has the words: all of the prompt's are among them.
        right = str(row) in self.right
        texts = [tokenizer.decode(each.token_ids) if right else "" for each in prompts]
        return [Answered(text, 0.0, 4) for text in texts]


def with_engine(monkeypatch: pytest.MonkeyPatch, engine: Wrong) -> Wrong:
    @contextmanager
    def own_engine(*_: object) -> Iterator[Wrong]:
        yield engine

    monkeypatch.setattr(command, "own_engine", own_engine)
    return engine


QUICK = ("--quick", "--tasks", "notes_3", "--policies", "snapkv", "fier-64", "--save")


def test_a_run_ends_where_full_answers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, output = with_engine(monkeypatch, Wrong()), tmp_path / "out"
    asked = ["evaluate", str(LOOKUP), *QUICK, "--no-plot", "--output", str(output)]
    assert main(asked) == 2
    out, err = capsys.readouterr()
    assert engine.asked == ["full"] and not (tmp_path / "cache" / "evaluation").exists()
    assert "full: 0.0% [0-39] of 6 answers right" in out and "Saved" not in out
    error = err.strip().splitlines()[-1]
    assert error.startswith("vllm-kvx evaluate: error: full has 0 of 6 answers right")
    assert "so no policy was asked and nothing is saved: use --tasks" in error
    # Its answers are kept, and decide at once.
    assert len((output / "answers.jsonl").read_text().splitlines()) == 6
    assert main(asked) == 2 and engine.asked == ["full"]
    capsys.readouterr()

    # Who goes on has a report, and hears what is not saved.
    assert main([*asked, "--keep-going"]) == 2
    out, err = capsys.readouterr()
    assert engine.asked == ["full", "snapkv", "fier-64"] and "Results:" in out
    why = "because full has none of 6 answers right: there is none to keep"
    lines = out.splitlines()
    assert lines[-3:] == [
        "Nothing was saved for servers of this model.",
        *(f"Not saved: {row}, {why}" for row in ("snapkv", "fier-64")),
    ]
    assert f"--save could not save snapkv, {why}; fier-64, {why}" in err
    assert not (tmp_path / "cache" / "evaluation").exists()


def test_what_is_saved_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = with_engine(monkeypatch, Wrong(["full", "snapkv"]))
    asked = ["evaluate", str(LOOKUP), *QUICK, "--no-plot", "--output", str(tmp_path / "out")]
    assert main(asked) == 0
    out = capsys.readouterr().out
    (path,) = (tmp_path / "cache" / "evaluation").iterdir()
    assert f"Saved for servers of this model: snapkv, fier-64, in {path}" in out
    assert list(json.loads(path.read_text())["policies"]) == ["snapkv", "fier-64:dense_below=0"]
    # A row without an answer is named beside those that are saved, and is an error.
    monkeypatch.setattr(command, "own_engine", does_not_start)
    assert main([*asked, "--policies", "snapkv", "quest-64"]) == 2
    out, err = capsys.readouterr()
    assert f"Saved for servers of this model: snapkv, in {path}" in out
    assert "Not saved: quest-64, which answered nothing" in out
    assert "--save could not save quest-64, which answered nothing" in err
    assert "the engine for quest-64 does not start" in err and engine.asked[0] == "full"


@pytest.mark.parametrize("is_demo", [True, False])
def test_quick_asks_the_demo_format_of_the_demo_checkpoint_alone(
    is_demo: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LOOKUP
    if not is_demo:
        model = tmp_path / "other"
        shutil.copytree(LOOKUP, model)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"rope_theta": 20000.0}))
    with_engine(monkeypatch, Wrong())
    output = tmp_path / "out"
    assert main(["evaluate", str(model), "--quick", "--no-plot", "--output", str(output)]) == 2
    asked = json.loads((output / "run.json").read_text())
    (task,), (length,) = asked["tasks"], asked["lengths"]
    assert (task, length) == (("notes_3", 1024) if is_demo else ("one_number", 1024))
    assert asked["samples"] == 6


def test_a_server_says_what_full_is_even_if_all_its_answers_are_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextmanager
    def server(url: str, policies: Iterable[Row], *_: object) -> Iterator[OverFp8]:
        yield OverFp8(policies)

    monkeypatch.setattr(command, "running_server", server)
    model = Model(str(LOOKUP), None, load_config(str(LOOKUP)), read_policies(["snapkv"], 8))
    args = Namespace(base_url="http://server", concurrency=1)
    full, snapkv = rows = [Row("full"), Row("snapkv")]
    missing: dict[Row, list[QuestionId]] = {full: [], snapkv: [QuestionId("notes", 320, 0)]}
    bar = AnswersBar({full: [], snapkv: [Prompt([1], 1)]})
    ((found, names),) = command.engines_of(args, [model], missing, 400, [], bar)
    assert isinstance(found, OverFp8) and found.rows == names == rows


def test_int8_cache_on_a_cpu() -> None:
    """Attention of our own reads it, which a server of `full` alone does not have."""
    asked = read_policies(["fier-64@int8_per_token_head", "quest-64@int8_per_token_head"], 8)
    command.check_rows(asked)
    for name in ("full@int8_per_token_head", "fier-64@int8_per_token_head-skip-0-1"):
        with pytest.raises(ToolError, match="vLLM's CPU attention has no such KV cache: ask on a"):
            command.check_rows(read_policies([name], 8))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--policies", "snapkvv"), "unknown policy 'snapkvv'"),
        (("--policies", "speed-8"), "8 layers"),
        (("--policies", "full@int4"), "over which full runs: write one of "),
        (("--policies", "full@bfloat16"), "full@bfloat16: vLLM's CPU attention has no such KV"),
        (("--policies", "full@fp8_per_token_head"), "vLLM's CPU attention has no such KV cache"),
        (("--policies", "snapkv@fp8"), "snapkv@fp8: retention and retrieval cannot address 8-bit"),
        (
            ("--policies", "full@fp8", "--engine-args", '{"kv_cache_dtype": "fp8_e5m2"}'),
            "full@fp8 would be compared with full over fp8_e5m2",
        ),
        (("--tasks", "niah"), "unknown task 'niah'"),
        (("--lengths", "9000"), "more than the model's context"),
        (("--speed", "nowhere.json"), "--speed is for plots, and --no-plot draws none"),
        (("--save", "--policies", "full"), "--save stores what policies keep of full's answers"),
        (("--save", "--tasks", "perplexity"), "perplexity alone has none: add other --tasks"),
    ],
)
def test_bad_input_is_one_message(
    more: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(tmp_path / "out", *more) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("vllm-kvx evaluate: error: ") and message in error
