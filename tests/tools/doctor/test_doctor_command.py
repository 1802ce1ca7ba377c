"""The whole command: a sound installation, broken ones, and what the shell is told."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import LOOKUP
from support.nightly import nightly

from vllm_kvx.cli import main
from vllm_kvx.tools.doctor import command, report
from vllm_kvx.tools.doctor.findings import Finding, Request
from vllm_kvx.tools.doctor.sections import SECTIONS

NAMES = [section.name for section in SECTIONS]
# Packages that stand in front of the real ones.
RAISES = 'raise ImportError("libcudart.so.12: cannot open shared object file")'
CRASHES = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"
HANGS = "import time\nprint('loading', flush=True)\ntime.sleep(600)"


def doctor(cache: Path, *argv: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    env = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"}
    env |= {"KVX_CACHE_ROOT": str(cache), **environment}
    command = [sys.executable, "-m", "vllm_kvx.cli", "doctor", str(LOOKUP), *argv]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def broken(folder: Path, package: str, code: str) -> dict[str, str]:
    """The environment in which importing `package` runs `code`."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}


def said(found: dict[str, Any], section: str, status: str) -> list[str]:
    return [each["says"] for each in found["sections"][section] if each["status"] == status]


@pytest.mark.skipif(torch.cuda.is_available(), reason="flags of a CPU server")
def test_a_sound_installation(tmp_path: Path) -> None:
    argv = ["--kv-policy", "speed-4", "--json", "--enforce-eager", "--max-model-len", "2048"]
    done = doctor(tmp_path, *argv, KVX_CPU="1")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["ok"] and list(found["sections"]) == NAMES
    assert said(found, "flags", "ok") == [
        "vLLM takes these flags, and --kv-policy speed-4 runs with them"
    ]
    # The flags of the server were read, not the model's configuration alone.
    assert any("a prompt of 2,048 tokens" in line for line in said(found, "policy", "ok"))
    mends = [each["mend"] for each in found["sections"]["measured"]]
    assert mends == [
        f"vllm-kvx tune-speed {LOOKUP} --cutoff 4 --out DIR",
        f"vllm-kvx evaluate {LOOKUP} --policies speed-4 --save",
    ]


def test_every_flag_of_ours_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []
    monkeypatch.setattr(
        command, "examine", lambda request, timeout: iter(asked.append(request) or ())
    )
    policies = ["--kv-policy", "full", "--kv-layout", "speed-4:tail=2", "fier-64"]
    main(["doctor", "m", *policies, "--kv-request-policies", "off", "--enforce-eager", "--json"])
    main(["doctor", "m"])
    expected = Request(
        model="m",
        policy="full",
        layout=("speed-4:tail=2", "fier-64"),
        request_policies="off",
        serve_args=("--enforce-eager",),
    )
    assert asked == [expected, Request(model="m")]


@pytest.mark.parametrize(
    ("code", "says", "timeout"),
    [
        (RAISES, "torch cannot be imported: ImportError: libcudart.so.12: cannot open", "60"),
        (CRASHES, "the check was killed by SIGSEGV", "60"),
        (HANGS, "the check hangs: no answer in 8 s; the last that it said: loading", "8"),
    ],
    ids=["raises", "crashes", "hangs"],
)
def test_a_broken_torch_is_a_finding(tmp_path: Path, code: str, says: str, timeout: str) -> None:
    environment = broken(tmp_path, "torch", code)
    argv = ["--kv-policy", "speed-4", "--json", "--timeout", timeout, "--gpu-memory", "80"]
    done = doctor(tmp_path, *argv, **environment)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert list(found["sections"]) == NAMES
    (line,) = said(found, "torch", "problem")
    assert line.startswith(says), line
    # What needs it is not tried; all else goes on, and knows the model.
    for name in ("gpu", "vllm", "ops", "flags"):
        (line,) = said(found, name, "note")
        assert line.startswith("not checked without torch"), line
    assert any("KV groups split at layer 4" in line for line in said(found, "policy", "ok"))
    assert any("2.00x" in line for line in said(found, "policy", "ok"))
    assert len(said(found, "measured", "note")) == 2


@nightly
def test_a_broken_vllm_is_a_finding(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--kv-policy", "fier-512", **broken(tmp_path, "vllm", CRASHES))
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    blocks = done.stdout.split("\nvllm\n")[1]
    assert blocks.startswith("  PROBLEM the check was killed by SIGSEGV")
    assert "not checked without vllm" in blocks
    # What the model is was told by the process before.
    assert "layout on 8 layers: no split, a sidecar of 1-bit keys" in blocks
    assert "its bytes are not told: vllm cannot be imported" in blocks
    assert done.stdout.rstrip().endswith("1 problem: see the lines marked PROBLEM")


def test_only_doctor_takes_other_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", "MODEL", "--enable-lora"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --enable-lora" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["evaluate", "M", "--taks", "a"],
            "evaluate: error: unrecognized arguments: --taks a (did you mean --tasks?)",
        ),
        (
            ["evaluate", "M", "--samples", "0"],
            "evaluate: error: argument --samples: must be at least 1",
        ),
        (["evalute", "M"], "vllm-kvx: error: argument COMMAND: invalid choice: 'evalute'"),
        ([], "vllm-kvx: error: the following arguments are required: COMMAND"),
    ],
)
def test_a_bad_flag_is_one_line(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1 and "--help" in said


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--kv-policy", "sped-4"], "did you mean speed-K?"),
        (["--additional-config", "[1]"], "must be a JSON object"),
        (["--gpu-memory", "0"], "must be a number above 0"),
    ],
)
def test_bad_options_are_refused(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "MODEL", *argv])
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_findings_as_text() -> None:
    found = {"cache": [Finding("ok", "fine"), Finding("problem", "a\n- b", "do this")]}
    assert report.section("cache", found["cache"]).splitlines() == [
        "cache",
        "  ok      fine",
        "  PROBLEM a",
        "          - b",
        "          -> do this",
    ]
    assert report.exit_code(found) == 1
    assert report.verdict(found, Request()) == "1 problem: see the lines marked PROBLEM"
    found["cache"].pop()
    assert report.exit_code(found) == 0
    assert "name a MODEL" in report.verdict(found, Request())
    assert "would start" in report.verdict(found, Request(model="m"))
