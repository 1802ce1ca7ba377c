"""What a server's log says of tuned weights, of others, and of a policy that they are not for."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.records.tuned_weights import FILE, TunedRecord
from vllm_kvx.server.tuned_weights_notice import TunedWeightsNotice
from vllm_kvx.server.validate import identity_of

AGREEMENT: Any = {
    "before": {"kl": 1.5, "greedy": 0.4, "tokens": 900},
    "after": {"kl": 0.03, "greedy": 0.971, "tokens": 900},
}
SAYS = "by self-distillation of org/model, held-out agreement 97.1% of tokens, KL 0.03"


def tuned(policy: str, layers: int = 8) -> TunedRecord:
    facts: dict[str, Any] = {"data": {}, "training": {}, "versions": {}, "date": "2026-01-02"}
    facts |= {"original": "org/model", "method": "lora", "loss": "self-distillation"}
    return TunedRecord(policy, layers=layers, agreement=AGREEMENT, command="c", **facts)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path))


class Log(logging.Handler):
    """Level and text of what servers say of tuning; that nobody has evaluated is another test's."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "weights" in text or FILE in text:
            self.lines.append((record.levelname, text))


@pytest.fixture
def log(make_config) -> Iterator[Log]:
    make_config()  # The first configuration takes all handlers from vLLM's loggers.
    logger, handler = logging.getLogger("vllm.kvx"), Log()
    level = logger.level
    logger.setLevel(logging.INFO)  # Another test's engine may log less.
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def start(make_config, model_dir, log: Log) -> Callable[..., list[tuple[str, str]]]:
    """What the log says at start: start(policy, *kv_layout, record=...)."""

    def lines(policy: str, *layout: str, record: TunedRecord | None = None) -> Any:
        model = model_dir()
        if record is not None:
            record.write(model)
        config = {"kv_layout": list(layout)} if layout else {}
        make_config(policy, model=model, dtype="float32", additional_config=config)
        return [(level, text.replace(model, "MODEL")) for level, text in log.lines]

    return lines


def test_what_a_quantized_kv_cache_keeps_is_asked_by_its_name(make_config, model_dir) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    make_config()
    logging.getLogger("vllm.kvx").addHandler(handler)
    try:
        make_config("speed-4", model=model_dir(), dtype="float32", kv_cache_dtype="fp8")
    finally:
        logging.getLogger("vllm.kvx").removeHandler(handler)
    (line,) = [line for line in said if "nobody has measured" in line]
    assert line.startswith("KV policy speed-4@fp8: ") and "--policies speed-4@fp8 --save" in line


def test_weights_that_were_tuned_for_it(start) -> None:
    line = f"KV policy speed-4: weights tuned for speed-4 ({SAYS})."
    assert start("speed-4", "speed-4+fier-64", record=tuned("speed-4")) == [("INFO", line)]


@pytest.mark.parametrize(
    ("policy", "method", "command"),
    [
        ("speed-4", "speed-4", "--cutoff 4"),
        ("speed-4+snapkv:kv_rate=0.2", "speed-4", "--cutoff 4"),
        ("speed-4:anchors=2", "speed-4:anchors=2", "--cutoff 4 --anchors 2"),
    ],
)
def test_weights_that_were_never_tuned(start, policy: str, method: str, command: str) -> None:
    assert start(policy) == [
        (
            "WARNING",
            f"KV policy {policy}: layers 4 to 7 see only anchors, tail and generated tokens, and "
            "weights that were not tuned for that lose answers. Tune them: `vllm-kvx tune-speed "
            f"MODEL {command} --out DIR`, then `vllm serve DIR --kv-policy {policy}`.",
        )
    ]


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (
            "speed-3",
            "layer 3 sees only anchors, tail and generated tokens here, and every prompt token in "
            "tuning",
        ),
        (
            "speed-6",
            "layers 4 to 5 see every prompt token here, and only anchors, tail and generated "
            "tokens in tuning",
        ),
        ("speed-4:anchors=4", "anchors=4 here, and anchors=1 in tuning"),
        ("speed-4:anchors=0,tail=3", "anchors=0 here, and anchors=1 in tuning; tail=3 here"),
    ],
)
def test_weights_that_were_tuned_for_another(start, policy: str, reason: str) -> None:
    ((level, line),) = start(policy, record=tuned("speed-4"))
    assert level == "WARNING"
    head = f"KV policy {policy}: weights tuned for speed-4, not for {policy}: {reason}"
    assert line.startswith(head), line
    assert f"Use speed-4 in the place of {policy}, or tune for it: `vllm-kvx tune" in line


def test_each_policy_of_the_server_has_a_line(start) -> None:
    found = start("speed-4", "speed-6", "fier-64", record=tuned("speed-6"))
    assert [(level, line.split(": ")[0]) for level, line in found] == [
        ("WARNING", "KV policy speed-4"),
        ("INFO", "KV policy speed-6"),
    ]


@pytest.mark.parametrize(("policy", "layout"), [("full", ()), ("snapkv:kv_rate=0.2", ("fier-64",))])
def test_tuned_weights_under_other_policies(start, policy: str, layout: tuple) -> None:
    record = tuned("speed-4:anchors=2")
    line = (
        f"KV policy {policy}: these weights were tuned for speed-4:anchors=2 ({SAYS}): --kv-policy "
        "speed-4:anchors=2 serves them so."
    )
    assert start(policy, *layout, record=record) == [("INFO", line)]


def test_other_weights_under_other_policies(start) -> None:
    assert start("snapkv:kv_rate=0.2") == []


def test_a_damaged_record_stops_no_server(make_config, model_dir, log: Log) -> None:
    model = model_dir()
    (Path(model) / FILE).write_text("{")
    make_config("speed-4", model=model)
    (damaged, untuned) = log.lines
    assert damaged[0] == untuned[0] == "WARNING"
    assert f"ignoring what these weights were tuned for: {model}/{FILE} is damaged" in damaged[1]
    assert "Tune them" in untuned[1]
    make_config("full", model=model)
    assert len(log.lines) == 3 and "is damaged" in log.lines[2][1]


def test_a_record_of_another_model(start) -> None:
    (foreign, untuned) = start("speed-4", record=tuned("speed-4", layers=16))
    assert "of a model of 16 layers, and this one has 8" in foreign[1]
    assert "Tune them" in untuned[1]


HUB = """
import json, sys
from vllm_kvx.policy.spec import parse_policy
from vllm_kvx.records.model_key import ModelIdentity
from vllm_kvx.server.tuned_weights_notice import TunedWeightsNotice

notice = TunedWeightsNotice(ModelIdentity("org/hub", {}, json.loads(sys.argv[1])), 8)
print(json.dumps([notice.as_json(), notice.lines([parse_policy("speed-4")])]))
"""


def test_models_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their snapshot is read where it lies, and a record that vLLM did not download is asked for.

    In a process of its own: the hub's library reads where its cache is when it is imported.
    """
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))

    def ask(revision: str | None = None) -> Any:
        command = [sys.executable, "-c", HUB, json.dumps(revision)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    found, ((line, is_well),) = ask("v2")
    fetch = "fetch their record: `hf download org/hub kvx_tuned.json --revision v2`. Tune them: "
    assert found is None and not is_well and fetch in line
    repository = tmp_path / "models--org--hub"
    snapshot = repository / "snapshots" / "0123abc"
    tuned("speed-4").write(snapshot)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    found, lines = ask()
    assert found["policy"] == "speed-4"
    assert lines == [[f"speed-4: weights tuned for speed-4 ({SAYS}).", True]]


def test_what_the_route_tells(make_config, model_dir) -> None:
    model = model_dir()
    tuned("speed-4:tail=2").write(model)
    notice = TunedWeightsNotice(identity_of(make_config("full", model=model)), 8)
    found = notice.as_json()
    assert found is not None
    assert json.loads(json.dumps(found)) == {
        "policy": "speed-4:tail=2",
        "original": "org/model",
        "method": "lora",
        "loss": "self-distillation",
        "agreement": AGREEMENT,
        "date": "2026-01-02",
    }
    names = [
        "full",
        "snapkv:kv_rate=0.2",
        "speed-4:tail=2",
        "speed-4:tail=2+fier-64",
        "speed-4",
        "speed-5",
    ]
    assert notice.matches(map(parse_policy, names)) == {
        "speed-4:tail=2": True,
        "speed-4:tail=2+fier-64": True,
        "speed-4": False,
        "speed-5": False,
    }
