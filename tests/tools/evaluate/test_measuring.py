"""What `vllm-kvx evaluate` says before an engine measures layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.models import LOOKUP

from vllm_kvx.cli import main
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.records.layers import save
from vllm_kvx.tools.checkpoint.loading import load_config
from vllm_kvx.tools.evaluate import command
from vllm_kvx.tools.evaluate.engine import NotStarted
from vllm_kvx.tools.evaluate.measuring import measures_first
from vllm_kvx.tools.evaluate.original import Model


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "cache"))


def policies(*names: str) -> list[KVPolicy]:
    return list(map(parse_policy, names))


@pytest.fixture
def model() -> Model:
    return Model(str(LOOKUP), None, load_config(str(LOOKUP)), {})


def test_a_layer_that_is_not_known_is_told_once(model: Model) -> None:
    given = ("full", "snapkv:kv_rate=0.2", "fastkv:kv_rate=0.4", "fastkv:kv_rate=0.4+fier-64")
    (line,) = measures_first(model, policies(*given))
    assert line.startswith("fastkv:kv_rate=0.4: tsp_layer is not known for lookup-8l, so")
    assert f"`vllm-kvx calibrate {LOOKUP} --method fastkv" in line
    assert "tsp_layer=<int>" in line and "\n" not in line
    both = measures_first(model, policies("fastkv:kv_rate=0.4", "structkv"))
    assert ["tsp_layer=<int>" in both[0], "pivot=<int>" in both[1]] == [True, True]


def test_nothing_is_told_where_nothing_is_measured(model: Model) -> None:
    named = policies("fastkv:tsp_layer=3,kv_rate=0.4", "structkv:pivot=online", "speed-4")
    assert measures_first(model, named) == []
    assert measures_first(model, policies("fier-64", "full")) == []


def test_a_layer_that_was_measured_is_not_measured_again(model: Model) -> None:
    record = {"method": "fastkv", "key": model.key, "layers": 8, "tsp_layer": 5}
    settings = {"window": 8, "kernel": 7, "tsp_rate": 0.2, "reduction": "sum"}
    save({**record, **settings, "criterion": "answers"})
    assert measures_first(model, policies("fastkv:kv_rate=0.4")) == []


def test_the_command_says_it_before_the_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = list[str]()

    @contextmanager
    def engine(*_: object) -> Iterator[None]:
        said.append(capsys.readouterr().err)
        raise NotStarted("no memory")
        yield

    monkeypatch.setattr(command, "own_engine", engine)
    asked = ["evaluate", str(LOOKUP), "--policies", "fastkv:kv_rate=0.4", "--no-plot"]
    asked += ["--tasks", "notes_3", "--lengths", "320", "--samples", "1"]
    assert main([*asked, "--output", str(tmp_path / "out")]) == 2
    assert "fastkv:kv_rate=0.4: tsp_layer is not known for lookup-8l, so the engine" in said[0]
