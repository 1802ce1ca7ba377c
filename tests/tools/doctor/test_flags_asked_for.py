"""What doctor says of a server's flags."""

from pathlib import Path

import pytest
from support.findings import ON_CPU, lines

from vllm_kvx import plugin
from vllm_kvx.tools.doctor.findings import Finding


def test_flags_that_are_refused_are_all_named(doctor) -> None:
    flags = ("--enable-prompt-embeds", "--pipeline-parallel-size", "2", *ON_CPU)
    (problem,) = doctor("speed-3", serve_args=flags)("model", "flags")
    assert problem.status == "problem"
    assert problem.says.startswith("KV policy speed-3 cannot run in this configuration:")
    assert "drop --enable-prompt-embeds" in problem.says
    assert "--pipeline-parallel-size 1" in problem.says
    # Neither is what `vllm-kvx serve` sets on a CPU.
    assert not problem.mend


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--no-such-flag",), "unrecognized arguments: --no-such-flag"),
        (("--max-model-len", "many"), "--max-model-len"),
        (("--max-model-len", "9999999"), "vLLM refuses: "),
    ],
)
def test_flags_that_vllm_refuses(doctor, flags: tuple[str, ...], says: str) -> None:
    (problem,) = doctor("speed-4", serve_args=(*flags, *ON_CPU))("model", "flags")
    assert problem.status == "problem" and says in problem.says, problem


def test_two_policies_are_refused_as_the_server_does(doctor) -> None:
    asked = doctor("speed-4", additional_config={"kv_policy": "speed-3"}, serve_args=ON_CPU)
    (problem,) = asked("model", "flags")
    assert problem.status == "problem" and "name different policies" in problem.says


def test_what_requests_may_name_is_told(doctor) -> None:
    asked = doctor("speed-4", request_policies="list", serve_args=ON_CPU)
    assert lines(asked("model", "flags"), "problem") == []
    assert "requests may name these policies alone: speed-4 (kv_request_policies)" in lines(
        asked("policy"), "ok"
    )
    asked = doctor("speed-4", additional_config={"kv_request_policies": "none"})
    (problem,) = asked("model", "policy")[1:]
    assert problem.status == "problem" and "must be one of off, layout, list" in problem.says


def test_further_policies_are_told(doctor) -> None:
    layout = ("speed-4", "fier-64")
    asked = doctor("full", layout=layout, request_policies="list")
    named = "requests may name these policies alone: full, speed-4, fier-64 (kv_request_policies)"
    assert named in lines(asked("model", "policy"), "ok")
    asked = doctor("full", layout=layout, serve_args=ON_CPU)
    assert lines(asked("model", "flags"), "problem") == []
    assert asked.context.additional_config == {"kv_policy": "full", "kv_layout": list(layout)}
    asked = doctor("full", layout=("speed-4",), additional_config={"kv_layout": ["speed-3"]})
    (problem,) = asked("model", "flags")
    assert problem.status == "problem" and "name different policies; drop one" in problem.says


def test_flags_in_a_config_file(doctor, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("kv-policy: speed-4\nkv-layout: [fier-64, speed-2]\n")
    asked = doctor(serve_args=("--config", str(file), *ON_CPU))
    assert lines(asked("model", "flags"), "problem") == []
    layout = {"kv_layout": ["fier-64", "speed-2"]}
    assert asked.context.additional_config == {"kv_policy": "speed-4", **layout}


def test_flags_without_a_policy(doctor) -> None:
    asked = doctor(serve_args=("--enable-prompt-embeds", *ON_CPU))
    taken, refused = asked("model", "flags")
    assert taken == Finding("ok", "vLLM takes these flags")
    assert refused.status == "note" and "drop --enable-prompt-embeds" in refused.says


def test_a_policy_that_nobody_reads(doctor, monkeypatch) -> None:
    monkeypatch.setattr(plugin, "is_loaded", lambda: False)
    asked = doctor(additional_config={"kv_policy": "speed-4"}, serve_args=ON_CPU)
    (problem,) = asked("model", "flags")
    assert problem.status == "problem" and "ignores kv_policy" in problem.says
