"""Layers that the server's policy leaves to measurement: found, or measured once."""

import io
import json
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference.wrappers import wrap
from safetensors.torch import load_file, save_file
from support.models import LOOKUP
from support.nightly import nightly

from vllm_kvx.cli import main
from vllm_kvx.config.settings import KVSettings
from vllm_kvx.policy.parameters import PolicyError
from vllm_kvx.records.layers import record_path
from vllm_kvx.records.model_key import model_key
from vllm_kvx.server import measured_layers as resolve
from vllm_kvx.server.measured_layers import find_measured
from vllm_kvx.server.validate import identity_of
from vllm_kvx.tools.calibrate import by_answers
from vllm_kvx.tools.checkpoint import questions
from vllm_kvx.tools.evaluate.original import models_of

TOOL = [sys.executable, "-m", "vllm_kvx.cli"]
# As the tests have time for.
SHORT = ["--count", "16", "--length", "240"]
# The family that is asked first has longer texts at the least.
LONGER = ["--count", "16", "--length", "340", "--reduction", "sum"]

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def processes_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the tests of this folder; two threads on tiny matrices mostly wait for each other."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Tool:
    """Stands for ``subprocess.Popen`` and keeps the arguments of each `vllm-kvx` that it runs."""

    def __init__(self, run: Run, other: Run) -> None:
        self.run, self.other = run, other
        self.ran: list[list[str]] = []

    def __call__(self, command: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(command, list) or command[:3] != TOOL:
            return self.other(command, *args, **kwargs)  # vLLM runs programs too.
        self.ran.append(command[3:])
        return self.run(command, **kwargs)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Tool:
    """The tool in a process of its own, as a server runs it, on fewer lookups."""
    real = subprocess.Popen
    tool = Tool(lambda command, **kwargs: real([*command, *LONGER], **kwargs), real)
    monkeypatch.setattr(subprocess, "Popen", tool)
    return tool


class Done:
    """A process that has ended."""

    def __init__(self, code: int, said: str) -> None:
        self.returncode, self.stderr = code, io.StringIO(said)

    def poll(self) -> int:
        return self.returncode


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    """The tool in this process, which spares the seconds of its imports."""

    def run(command: list[str], env: dict[str, str], **_: Any) -> Done:
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as its_own:
            its_own.setenv("KVX_CACHE_ROOT", env["KVX_CACHE_ROOT"])
            code = main([*command[3:], *SHORT])
        return Done(code, capsys.readouterr().err)

    # The one kind that the demo checkpoint answers.
    monkeypatch.setattr(questions, "CALIBRATION", {"notes": ("notes",)})
    monkeypatch.setattr(by_answers, "CALIBRATION", {"notes": ("notes",)})

    tool = Tool(run, subprocess.Popen)
    monkeypatch.setattr(subprocess, "Popen", tool)
    return tool


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The checkpoint to change."""
    return copy_of_lookup(tmp_path / "model")


def copy_of_lookup(path: Path, **changes: Any) -> Path:
    shutil.copytree(LOOKUP, path)
    config = json.loads((path / "config.json").read_text())
    config |= changes
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def find(make_config: Callable[..., Any]) -> Callable[..., tuple[dict[str, Any], list[str]]]:
    """``find_measured`` on a model's configuration: what is in ``additional_config`` then, lines.

    Keywords are further keys of ``additional_config``.
    """

    def find(
        model: Path, policy: str = "structkv:kv_rate=0.1", load_format: str = "auto", **config: Any
    ) -> tuple[dict[str, Any], list[str]]:
        vllm_config = make_config(model=str(model), load_format=load_format, max_model_len=64)
        vllm_config.additional_config = {"kv_policy": policy, **config}
        lines = find_measured(vllm_config, identity_of(vllm_config))
        return vllm_config.additional_config, lines

    return find


def record_of(model: Path) -> tuple[Path, dict[str, Any]]:
    """What is stored for a model, and where."""
    config = json.loads((model / "config.json").read_text())
    path = record_path("structkv", model_key(config, model))
    return path, json.loads(path.read_text())


def test_a_server_measures_before_its_first_start(
    process: Tool, make_config: Callable[..., Any], cache: Path
) -> None:
    settings: dict[str, Any] = {"model": str(LOOKUP), "load_format": "auto", "dtype": "float32"}
    settings["tensor_parallel_size"] = 2  # No rank has any part in it.
    vllm_config = make_config("structkv:kv_rate=0.1", **settings)
    [arguments] = process.ran
    assert arguments[:2] == ["calibrate", str(LOOKUP)]
    path, record = record_of(LOOKUP)
    assert [*cache.rglob("*.*")] == [path]  # The lock is gone.
    assert record["layers"] == 8 and record["window"] == 8 and record["decay"] == 0.9
    assert record["criterion"] == "answers" and record["asked"] == "notes"
    assert record["prompts"]["source"] == "built-in" and record["prompts"]["count"] == 48
    pivot = record["pivot"]
    # Other processes look there, and nowhere else.
    assert vllm_config.additional_config == {
        "kv_policy": "structkv:kv_rate=0.1",
        "kv_measured": {"pivot": pivot},
    }
    found = KVSettings.from_vllm_config(vllm_config)
    assert found is not None and found.measured.as_dict()["pivot"] == pivot
    assert str(found.policy) == f"structkv:pivot={pivot}" == str(found.parse("structkv"))

    # A second start.
    again = make_config("structkv:kv_rate=0.1", **settings)
    assert again.additional_config["kv_measured"]["pivot"] == pivot
    again = make_config(**settings)
    again.additional_config = {"kv_policy": "structkv:kv_rate=0.5"}
    line = f"StructKV: pivot=calibrated is layer {pivot} (calibrated by answers: {path})."
    assert find_measured(again, identity_of(again))[0] == line
    assert again.additional_config["kv_measured"]["pivot"] == pivot
    assert find_measured(again, identity_of(again)) == []
    assert len(process.ran) == 1


def test_another_model_is_measured_too(
    tool: Tool, find: Callable[..., Any], model: Path, tmp_path: Path, cache: Path
) -> None:
    find(model)
    assert len(tool.ran) == 1
    fewer = copy_of_lookup(tmp_path / "fewer", num_hidden_layers=6)
    config, _ = find(fewer)
    assert tool.ran[1:] == [["calibrate", str(fewer), *tool.ran[0][2:]]]
    assert (
        record_of(fewer)[1]["layers"] == 6
        and config["kv_measured"]["pivot"] == record_of(fewer)[1]["pivot"]
    )

    tuned = copy_of_lookup(tmp_path / "tuned")
    weights = load_file(tuned / "model.safetensors")
    weights["model.layers.3.self_attn.q_proj.weight"] *= 4
    save_file(weights, tuned / "model.safetensors", {"format": "pt"})
    find(tuned)
    assert len(tool.ran) == 3
    # Each has a record of its own, which is found; whatever the model is called.
    records = {record_of(each)[0] for each in (model, fewer, tuned)}
    assert len(records) == 3 == len([*cache.rglob("*.json")])
    tuned.rename(tmp_path / "renamed")
    for each in (model, fewer, tmp_path / "renamed"):
        assert find(each)[0]["kv_measured"]["pivot"] == record_of(each)[1]["pivot"]
    assert len(tool.ran) == 3


@nightly
def test_a_model_that_also_reads_images_is_measured_too(
    tool: Tool, find: Callable[..., Any], tmp_path: Path, cache: Path
) -> None:
    """Its language model is, and every tool finds the record that a server finds."""
    pytest.importorskip("torchvision", reason="vLLM's modules of such models import it")
    wrapper = wrap(tmp_path / "wrapper", LOOKUP)
    config, _ = find(wrapper)
    [path] = cache.rglob("*.json")
    assert config["kv_measured"]["pivot"] == json.loads(path.read_text())["pivot"]
    asked = Namespace(model=str(wrapper), revision=None, policies=["snapkv"], original=None)
    [model] = models_of(asked)
    assert path.name == f"structkv-{model.key}.json"


def test_a_record_of_no_use_is_measured_again(
    tool: Tool, find: Callable[..., Any], model: Path
) -> None:
    """Of other layers, with a layer that the model has not, of another model, and no JSON."""
    config, _ = find(model)
    path, good = record_of(model)
    changes: list[dict[str, Any]] = [{"layers": 6, "pivot": 1}, {"pivot": 8}, {"key": "0"}]
    bad = [*(json.dumps(good | change) for change in changes), "{"]
    for measured, text in enumerate(bad, start=2):
        path.write_text(text)
        assert find(model)[0] == config
        assert len(tool.ran) == measured, text
        again = record_of(model)[1]
        assert all(again[name] == good[name] for name in ("key", "layers", "pivot", "prompts"))


def test_the_policys_parameters_are_measured(
    tool: Tool, find: Callable[..., Any], model: Path
) -> None:
    find(model)
    for policy, changed in (
        ("structkv:window=4,kv_rate=0.1", {"window": 4}),
        ("structkv:window=4,struct_rate=0.5,kv_rate=0.1", {"window": 4, "struct_rate": 0.5}),
        ("structkv:struct_rate=0.5,decay=0.8,kv_rate=0.1", {"struct_rate": 0.5, "decay": 0.8}),
    ):
        before = len(tool.ran)
        config, _ = find(model, policy)
        assert find(model, policy)[0] == config
        assert len(tool.ran) == before + 1
        record = record_of(model)[1]
        assert changed.items() <= record.items()
        assert config["kv_measured"]["pivot"] == record["pivot"]
    # Retention and the weights of Eq. 8 have no part in it.
    find(model, "structkv:struct_rate=0.5,decay=0.8,kv_rate=0.4,entropy_weight=0.1")
    assert len(tool.ran) == 4


def test_fastkv_is_measured_too(tool: Tool, find: Callable[..., Any], model: Path) -> None:
    config, [line] = find(model, "fastkv:tsp_rate=0.2,kv_rate=0.1")
    [ran] = tool.ran
    assert ran[:4] == ["calibrate", str(model), "--method", "fastkv"]
    assert ran[4:] == ["--window", "8", "--kernel", "7", "--tsp-rate", "0.2", "--no-plot"]
    # Its layers 0 to 3 find the answer, and the third one shows where it stands.
    assert config["kv_measured"]["tsp_layer"] == 3 and line.startswith(
        "FastKV: tsp_layer=auto is layer 3 ("
    )
    # It is the usual rate, so that a policy without one takes it.
    assert find(model, "full", kv_layout=["fastkv:kv_rate=0.3"])[0]["kv_measured"]["tsp_layer"] == 3
    assert len(tool.ran) == 1


def test_a_rate_is_measured_with_its_layer(
    tool: Tool, find: Callable[..., Any], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_answers, "SEARCHED", (0.3, 0.4))
    config, [line] = find(model, "fastkv:kv_rate=0.1")
    [ran] = tool.ran
    assert ran[2:] == ["--method", "fastkv", "--window", "8", "--kernel", "7", "--no-plot"]
    measured = config["kv_measured"]
    assert measured["tsp_rate"] in (0.3, 0.4)
    assert f"is layer {measured['tsp_layer']} with " in line
    assert f"tsp_rate={measured['tsp_rate']}" in line
    settings = KVSettings.of(config, 8)
    own, rate = str(settings.policy), f"tsp_rate={measured['tsp_rate']}"
    assert f"tsp_layer={measured['tsp_layer']}" in own and rate in own
    assert rate in str(settings.parse("fastkv:kv_rate=0.3"))
    # A rate of its own is kept, and a layer of its own comes with the usual one.
    assert "tsp_rate=0.7" in str(settings.parse("fastkv:tsp_rate=0.7"))
    assert str(settings.parse("fastkv:tsp_layer=3")) == "fastkv:tsp_layer=3"
    status = settings.measured.as_status()
    assert status["kv_tsp_rate"] == measured["tsp_rate"]
    assert settings.measured.of_status(status) == settings.measured
    # A second start finds both; one that names the rate finds the layer.
    assert find(model, "fastkv:kv_rate=0.1")[0] == config
    named = find(model, f"fastkv:kv_rate=0.1,tsp_rate={measured['tsp_rate']}")[0]["kv_measured"]
    assert named == {key: measured[key] for key in named} and "tsp_rate" in named
    assert len(tool.ran) == 1
    with pytest.raises(ValueError, match=r"tsp_rate must be in \(0, 1\], got 2"):
        KVSettings.of({**config, "kv_measured": {"tsp_rate": 2}}, 8)


def test_the_papers_layer_is_said_to_be_the_papers(
    find: Callable[..., Any], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "paper_tsp_layer", lambda _: 5)
    config, lines = find(model, "fastkv:kv_rate=0.1", load_format="dummy")
    assert config["kv_measured"]["tsp_layer"] == 5
    assert lines[0] == "FastKV: tsp_layer=auto is layer 5 (the paper's)."
    assert "not measured by answers on these weights" in lines[1]


def test_the_measured_reduction_goes_with_the_layer(
    tool: Tool, find: Callable[..., Any], model: Path
) -> None:
    find(model, "fastkv:tsp_reduction=max,tsp_rate=0.2,kv_rate=0.1")
    assert tool.ran[0][-3:-1] == ["--reduction", "max"]
    config, [line] = find(model, "fastkv:kv_rate=0.1")
    assert len(tool.ran) == 1 and line.startswith(
        "FastKV: tsp_layer=auto is layer 3 with tsp_reduction=max (calibrated by answers"
    )
    assert config["kv_measured"] == {"tsp_layer": 3, "tsp_reduction": "max"}
    settings = KVSettings.of(config, 8)
    assert str(settings.policy) == "fastkv:tsp_layer=3,tsp_reduction=max"
    # A layer that is given stands for itself.
    assert str(settings.parse("fastkv:tsp_layer=3")) == "fastkv:tsp_layer=3"
    with pytest.raises(ValueError, match="tsp_reduction must be one of sum, max"):
        KVSettings.of({**config, "kv_measured": {"tsp_reduction": "mean"}}, 8)


def test_one_server_measures_for_one_set_of_parameters(
    tool: Tool, find: Callable[..., Any], model: Path
) -> None:
    for other in ("fastkv:kv_rate=0.1", "fastkv:tsp_rate=0.2,kv_rate=0.1"):
        with pytest.raises(PolicyError, match=r"another tsp_rate.*write tsp_layer=<int> in one"):
            find(model, other, kv_layout=["fastkv:tsp_rate=0.4,kv_rate=0.1"])
    given = "fastkv:tsp_rate=0.2,kv_rate=0.1"
    config, _ = find(model, given, kv_layout=["fastkv:tsp_rate=0.4,tsp_layer=3,kv_rate=0.1", given])
    assert config["kv_measured"]["tsp_layer"] == 3


def test_policies_that_the_server_makes_room_for(
    tool: Tool, find: Callable[..., Any], model: Path
) -> None:
    names = ["structkv:kv_rate=0.2", "structkv:kv_rate=0.1", "no policy"]
    config, lines = find(model, "full", kv_layout=names)
    assert len(tool.ran) == len(lines) == 1
    assert config["kv_measured"]["pivot"] == record_of(model)[1]["pivot"]


@pytest.mark.parametrize(
    ("policy", "config"),
    [
        ("structkv:pivot=3,kv_rate=0.1", {}),
        ("structkv:pivot=online,kv_rate=0.1", {}),
        ("structkv:struct_rate=1,kv_rate=0.1", {}),
        ("structkv:kv_rate=0.1", {"kv_measured": {"pivot": 3}}),
        ("speed-4", {}),
    ],
)
def test_what_needs_no_measurement(
    tool: Tool, find: Callable[..., Any], model: Path, policy: str, config: dict[str, Any]
) -> None:
    assert find(model, policy, **config) == ({"kv_policy": policy, **config}, [])
    assert not tool.ran


def test_where_nothing_can_be_measured(
    tool: Tool, find: Callable[..., Any], model: Path, tmp_path: Path, monkeypatch
) -> None:
    way_out = r"write pivot=<int>, or measure it beforehand .*calibrate \S+ --method structkv"
    with pytest.raises(PolicyError, match=rf"\(its weights are dummies\): {way_out}"):
        find(model, load_format="dummy")
    assert not tool.ran
    # What the tool said last is the reason.
    bare = copy_of_lookup(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    (bare / "tokenizer_config.json").unlink()
    with pytest.raises(PolicyError, match=rf"\(.*no tokenizer that loads.*\): {way_out}"):
        find(bare)
    monkeypatch.setenv("KVX_CALIBRATION_LIMIT", "0")
    with pytest.raises(PolicyError, match=rf"\(KVX_CALIBRATION_LIMIT=0, .*nothing\): {way_out}"):
        find(model)
    assert len(tool.ran) == 1


def test_where_nothing_can_be_kept(
    tool: Tool, find: Callable[..., Any], model: Path, tmp_path: Path, monkeypatch, log: list[str]
) -> None:
    """The start goes on, and says which variable to set."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "file"))
    config, [line] = find(model)
    assert line.endswith("(calibrated by answers for this start alone).")
    [line] = [line for line in log if line.startswith("cannot write to ")]
    assert line.startswith(f"cannot write to {tmp_path / 'file' / 'calibration'}: ")
    assert "; set KVX_CACHE_ROOT to a directory that can be written. What is" in line
    assert find(model)[0] == config
    assert len(tool.ran) == 2
    assert (tmp_path / "file").read_text() == "in the way"
