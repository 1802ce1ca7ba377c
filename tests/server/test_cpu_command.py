"""vLLM's commands on its build for CPUs: what they say by themselves, and `vllm-kvx serve`."""

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

from benchmarks.common.server import vllm_command
from vllm_kvx import cli
from vllm_kvx.compat import cpu_mode
from vllm_kvx.errors import ToolError
from vllm_kvx.tools.serve import command as serve

beside_vllm_cpu = pytest.mark.skipif(
    not cpu_mode.command_is_broken(), reason="vLLM's command starts by itself here"
)
ADDED = ("--enforce-eager", "--dtype", "float32", "--block-size", "32")


@pytest.fixture(autouse=True)
def nobody_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVX_CPU", "TRITON_INTERPRET", "VLLM_CPU_KVCACHE_SPACE", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(serve, "is_cpu_build", lambda: True)


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True)


# vLLM's own command.


@beside_vllm_cpu
@pytest.mark.parametrize(
    "vllm",
    [(vllm_command(),), (sys.executable, "-P", "-m", "vllm.entrypoints.cli.main")],
    ids=["vllm", "python -m"],
)
def test_serve_says_what_to_type(vllm: Sequence[str]) -> None:
    done = run(*vllm, "serve", "nowhere/m", "--port", "1")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("vllm serve: error: this is vLLM's CPU build (vllm-cpu)")
    for typed in ("`vllm-kvx serve ...`", "`KVX_CPU=1 vllm serve ...`", "`KVX_CPU=0 vllm serve"):
        assert typed in line


@beside_vllm_cpu
def test_the_version_is_told() -> None:
    done = run(vllm_command(), "--version")
    expected = f"{metadata.version('vllm-cpu')}+cpu"
    assert (done.returncode, done.stdout.split()[-1]) == (0, expected), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ("serve m --port 1", "serve"),
        ("run-batch -i a -o b", "run-batch"),
        ("bench throughput --model m", "bench throughput"),
        ("bench serve --model m", ""),
        ("serve --help", ""),
        ("serve -h", ""),
        ("serve --help=max-model-len", ""),
        ("--version", ""),
        ("collect-env", ""),
        ("chat", ""),
        ("", ""),
    ],
)
def test_which_commands_start_an_engine(arguments: str, command: str) -> None:
    assert cpu_mode.engine_command(arguments.split()) == command


@pytest.mark.parametrize(
    ("argv", "distributions", "chosen", "ends", "named"),
    [
        (["/bin/vllm", "serve", "m"], ["vllm-cpu"], None, True, False),
        (["/bin/vllm", "serve", "m"], ["vllm-cpu"], "0", False, True),
        (["/bin/vllm", "--version"], ["vllm-cpu"], None, False, True),
        # A build for GPUs, or a CPU build of that name, needs nothing; nor do other programs.
        (["/bin/vllm", "serve", "m"], ["vllm"], None, False, True),
        (["/bin/vllm", "serve", "m"], ["vllm", "vllm-cpu"], None, False, True),
        (["/bin/vllm", "serve", "m"], [], None, False, False),
        (["serve.py", "serve", "m"], ["vllm-cpu"], None, False, False),
        (["", "serve", "m"], ["vllm-cpu"], None, False, False),
        ([], ["vllm-cpu"], None, False, False),
    ],
)
def test_when_the_plugin_speaks(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    distributions: list[str],
    chosen: str | None,
    ends: bool,
    named: bool,
) -> None:
    """named: whether somebody who asks for the version of `vllm` is told one afterwards."""

    def version(name: str) -> str:
        if name not in distributions:
            raise metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(sys, "argv", argv)
    if chosen is not None:
        monkeypatch.setenv("KVX_CPU", chosen)
    if ends:
        with pytest.raises(SystemExit) as end:
            cpu_mode.platform_plugin()
        assert end.value.code == 2 and capsys.readouterr().err.count("\n") == 1
    else:
        cpu_mode.platform_plugin()
        assert capsys.readouterr().err == ""
    if "vllm" in distributions:
        assert metadata.version is version
    if named:
        assert metadata.version("vllm").startswith("0.32.0")
    else:
        with pytest.raises(metadata.PackageNotFoundError):
            metadata.version("vllm")


# vllm-kvx serve.


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ("m", ADDED),
        ("", ADDED),
        ("m --port 1 --kv-policy snapkv:kv_rate=0.2", ADDED),
        ("m --enforce-eager", ADDED[1:]),
        ("m --no-enforce-eager", ADDED[1:]),
        ("m --enforce_eager", ADDED[1:]),
        ("m --enforce", ADDED[1:]),
        ("m -O0", ADDED[1:]),
        ("m -O.mode=0", ADDED[1:]),
        ("m -cc.mode 0", ADDED[1:]),
        ("m --compilation-config.mode 0", ADDED[1:]),
        ("m --dtype=bfloat16", (ADDED[0], *ADDED[3:])),
        ("m --dtype auto --block_size=64", (ADDED[0],)),
        ("m --kv-policy fier-256:group=64", (*ADDED[:4], "64")),
        ("m --kv-policy quest-64:page=16", ADDED),
        ("m --dtype half --block-size 16 --enforce-eager", ()),
        ("m --help", ()),
        ("--help=all", ()),
    ],
)
def test_what_is_added_on_a_cpu(arguments: str, flags: Sequence[str]) -> None:
    assert serve.needs_of(arguments.split()).flags == tuple(flags)


def test_what_a_configuration_file_says_is_not_added(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    for given in (["--config", str(file)], [f"--config={file}"]):
        assert serve.needs_of(["m", *given]).flags == ADDED, "it is not there, or says nothing"
        file.write_text("enforce_eager: false\ndtype: auto\nkv-cache-memory-bytes: 1G\n")
        needs = serve.needs_of(["m", *given])
        assert needs.flags == ADDED[3:] and needs.environment == {"KVX_CPU": "1"}
        file.write_text("additional-config:\n  kv_layout: ['fier-256:group=128']\n")
        assert serve.needs_of(["m", *given]).flags == (*ADDED[:4], "128")
        file.write_text("[not a mapping")
    assert serve.needs_of(["m", "--config"]).flags == ADDED


def test_which_variables_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"KVX_CPU": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    assert serve.needs_of(["m"]).environment == both
    # vLLM's variable would win over these flags.
    for flag in ("--kv-cache-memory-bytes=1G", "--gpu-memory-utilization=0.5"):
        assert serve.needs_of(["m", flag]).environment == {"KVX_CPU": "1"}
    assert serve.needs_of(["--help"]).environment == {"KVX_CPU": "1"}
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.setenv("KVX_CPU", "yes")
    assert serve.needs_of(["m"]).environment == {}
    assert serve.needs_of(["m"]).flags == ADDED
    monkeypatch.setenv("KVX_CPU", "0")
    assert serve.needs_of(["m"]) == serve.Needs()


def executed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command that `vllm-kvx serve` becomes, and the variables that it adds."""
    became: list[tuple[list[str], dict[str, str]]] = []

    def execve(path: str, command: list[str], environment: dict[str, str]) -> None:
        assert path == command[0]
        became.append((command, environment))

    monkeypatch.setattr(os, "execve", execve)
    assert cli.main(["serve", *arguments]) == 0
    ((command, environment),) = became
    assert environment.items() >= os.environ.items()
    return command, {k: v for k, v in environment.items() if k not in os.environ}


def test_it_becomes_vllm_serve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["m", "--port", "1", "-tp", "2", "-O3", "--kv-policy=speed-4", "--host", "-", "a b"]
    command, added = executed(monkeypatch, *given)
    assert command == [vllm_command(), "serve", *given, *ADDED[1:]]
    assert added == {"KVX_CPU": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "vllm-kvx serve: adds what vLLM's build for CPUs needs: KVX_CPU=1, "
        "VLLM_CPU_KVCACHE_SPACE=2, --dtype float32, --block-size 32"
    )
    monkeypatch.setattr(serve, "is_cpu_build", lambda: False)
    for arguments in (given, ["--help"], ["--config", "nowhere.yaml"], []):
        assert executed(monkeypatch, *arguments) == ([vllm_command(), "serve", *arguments], {})
        assert capsys.readouterr().err == ""


def test_a_command_that_cannot_be_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "vllm"
    broken.write_text("#!/nowhere/python\n")
    broken.chmod(0o755)
    monkeypatch.setattr(serve.sysconfig, "get_path", lambda _: str(tmp_path))
    assert cli.main(["serve", "m"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"vllm-kvx serve: error: {broken} cannot be run: ")
    with pytest.raises(ToolError):
        serve.run(cli.parser().parse_args(["serve"]))


@beside_vllm_cpu
def test_vllm_reads_the_flags_and_ends_with_its_own_code() -> None:
    command = (sys.executable, "-m", "vllm_kvx.cli", "serve", "m", "--kv-policy", "snapvk")
    done = run(*command)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("vllm-kvx serve: adds what")
    assert "argument --kv-policy: " in done.stderr and "snapkv" in done.stderr
    assert "Traceback" not in done.stderr
