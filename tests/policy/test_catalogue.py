"""What `vllm-kvx policies` says of methods is what they do, and what Python users import."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import vllm_kvx
from vllm_kvx import cli
from vllm_kvx.policy import catalogue
from vllm_kvx.policy.axes import DECODE_READS, KV_MEMORY, PREFILL, Method
from vllm_kvx.policy.methods.snapkv import SnapKV
from vllm_kvx.policy.methods.table import METHODS
from vllm_kvx.policy.policy import KVPolicy
from vllm_kvx.policy.spec import check_served, parse_policy
from vllm_kvx.policy.storage import skipped_of, storage_of
from vllm_kvx.tools.policies.command import table

LENGTH, LAYERS, BLOCK = 32768, 32, 16


@pytest.mark.parametrize("name", METHODS)
def test_every_method_explains_itself(name: str) -> None:
    """A new one cannot be forgotten: its class says all that the tables show."""
    method = METHODS[name]
    entry = catalogue.entry(method)
    assert {"name", "summary", "paper"} <= set(vars(method)), "not those of the class above"
    assert entry.summary and not entry.summary.endswith(".") and "arXiv " in entry.paper
    for parameter in entry.parameters:
        assert len(parameter.meaning) > 3, f"{name}: its docstring has no line for {parameter.name}"
        assert parameter.required == (parameter.name in method.mandatory())
    check_served(entry.example)
    (part,) = parse_policy(method.example or name).parts
    assert entry.axes == part.axes
    given = {p.name: p.default for p in entry.parameters if p.default is not None}
    assert given == {k: v for k, v in part.parameters().items() if k not in method.mandatory()}


@pytest.mark.parametrize("name", METHODS)
def test_methods_save_what_they_say(name: str) -> None:
    """Counted as scheduler and worker count it: rows of the prompt, entries kept and read."""
    (method,) = parse_policy(METHODS[name].example or name).parts
    if method.to_measure is not None:
        method = replace(method, **{method.to_measure.parameter: LAYERS // 2})
    policy = KVPolicy.of([method])
    selection = policy.selection(LENGTH, LAYERS)
    layers = range(LAYERS)
    skips = any(skipped_of(policy, LENGTH, layer).size for layer in layers)
    kept = [storage_of(policy, LENGTH, layer, BLOCK, LAYERS).kept for layer in layers]
    saves = {
        PREFILL: skips or selection is not None,
        KV_MEMORY: min(kept) < LENGTH,
        DECODE_READS: min(kept) < LENGTH or policy.retrieve is not None,
    }
    assert set(method.saves) == {where for where, is_so in saves.items() if is_so}


def test_defaults_are_those_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_share(method: Method, *shares: Any) -> None:
        object.__setattr__(method, "kv_rate", 0.5)
        object.__setattr__(method, "kv_floor", 4711)

    monkeypatch.setattr("vllm_kvx.policy.methods.snapkv.set_share", set_share)
    defaults = {p.name: p.default for p in catalogue.entry(SnapKV).parameters}
    assert (defaults["kv_rate"], defaults["kv_floor"]) == (0.5, 4711)


def test_a_default_that_is_no_value_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A floor that follows another parameter is not one that has no default."""
    rules = {
        (name, parameter.name): parameter.default_rule
        for name, method in METHODS.items()
        for parameter in catalogue.entry(method).parameters
        if parameter.default_rule
    }
    follows = "kv_floor's value, and 512 with a budget"
    rate = rules.pop(("fastkv", "tsp_rate"))
    assert rate == "0.2, and with tsp_layer=auto what was measured together with the layer"
    assert rules == {
        ("fastkv", "tsp_floor"): follows,
        ("structkv", "struct_floor"): follows,
        ("streamingllm", "kv_floor"): "512",
    }
    assert SnapKV().kept(4096, 4096, 0, BLOCK, LAYERS) == 512
    for (name, key), rule in rules.items():
        assert f"{key}: an integer of at least 0; default: {rule}" in " ".join(
            run(capsys, name).split()
        )
    assert "kv_budget: an integer of at least 1; not given by default" in run(capsys, "snapkv")
    assert "have no default" not in " ".join(run(capsys).split())


@pytest.mark.parametrize("width", [72, 80, 100, 200])
def test_the_table_fits(width: int) -> None:
    lines = list(table(catalogue.entries(), width))
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    for method in METHODS.values():
        assert f"\n{method.usage()}" in text
        assert all(key in text for key in method.keys())  # noqa: SIM118
    words = " ".join(text.split())
    assert "kv_rate=0.1" in words and "layer=..." in words and "\nfull " in text


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(["policies", *argv]) == 0
    return capsys.readouterr().out


def test_a_policy_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("snapkv", "snapkv:kv_rate=0.2"):
        text = " ".join(run(capsys, name).split())
        assert "KV memory, decode reads" in text and "arXiv 2404.14469" in text
        assert "kernel: an odd integer from 1 to 127; default 7" in text
    assert run(capsys, "fier") == run(capsys, "fier-BUDGET") == run(capsys, "fier-64")
    both = run(capsys, "speed-24+fier-2048")
    assert run(capsys, "speed").strip() in both and run(capsys, "fier").strip() in both
    assert "required" in run(capsys, "gemfilter") and "stock vLLM" in run(capsys, "full")


def test_what_is_no_policy_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    for name, says in (("snapvk", "did you mean snapkv?"), ("snapkv:kv_rate=0", "(0, 1]")):
        assert cli.main(["policies", name]) == 2
        captured = capsys.readouterr()
        (line,) = captured.err.splitlines()
        assert line.startswith("vllm-kvx policies: error: ") and says in line
        assert not captured.out


def test_json_is_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "--json"))
    assert found["version"] == vllm_kvx.__version__
    assert [each["name"] for each in found["policies"]] == ["full", *METHODS]
    (fier,) = json.loads(run(capsys, "fier", "--json"))["policies"]
    assert fier["saves"] == ["decode reads"] and fier["number"] == "budget"
    budget = fier["parameters"][0]
    assert budget["schema"] == {"type": "integer", "minimum": 32, "maximum": 8192}
    assert {"policy", "additionalConfig", "batchLine"} <= set(found["schema"]["definitions"])


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m vllm_kvx.cli policies --json | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout == '{\n "versio' and not done.stderr


def test_python_users_import_them_from_the_package() -> None:
    from vllm_kvx import FIER, KVPolicy, PolicyError, Speed, parse_policy

    policy = KVPolicy.of([Speed(24), FIER(2048)])
    assert str(policy) == "speed-24+fier-2048" and parse_policy(str(policy)) == policy
    with pytest.raises(PolicyError, match=r"kv_rate must be a number in \(0, 1\], got 0"):
        vllm_kvx.SnapKV(kv_rate=0)
    methods = {method.__name__ for method in METHODS.values()}
    assert set(vllm_kvx.__all__) == methods | {
        *("KVPolicy", "PolicyError", "parse_policy", "__version__")
    }
    for name in vllm_kvx.__all__:
        assert getattr(vllm_kvx, name) is not None and name in dir(vllm_kvx)
    for name, method in METHODS.items():
        assert getattr(vllm_kvx, method.__name__) is METHODS[name]
    with pytest.raises(AttributeError, match="no attribute 'SnapVK'"):
        vllm_kvx.SnapVK  # noqa: B018


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    code = "import vllm_kvx, sys; print([m for m in sys.modules if m.startswith('vllm_kvx.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_the_pages_example_runs() -> None:
    """The block of docs/use/quickstart.md that makes policies in Python."""
    page = (Path(__file__).parents[2] / "docs" / "use" / "quickstart.md").read_text()
    (block,) = [
        text.partition("```")[0]
        for text in page.split("```python\n")[1:]
        if "from vllm_kvx import" in text
    ]
    names: dict[str, Any] = {"LLM": lambda model, **keywords: keywords}
    exec(block.replace("from vllm import LLM\n", ""), names)
    assert names["llm"] == {"additional_config": {"kv_policy": "snapkv:kv_rate=0.2"}}
    assert str(names["both"]) == "speed-24+fier-2048"
