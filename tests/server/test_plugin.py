"""The plugin itself: wrapping, the version gate, and that it is inert without a policy."""

import inspect
import os
import re
import subprocess
import sys
import textwrap
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
import vllm
from support.nightly import nightly
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.input_processor import InputProcessor

from vllm_kvx import plugin
from vllm_kvx.compat import vllm_signatures as seams
from vllm_kvx.compat.cpu_mode import check_platform, cpu_mode_requested
from vllm_kvx.compat.serve_command import serve_command


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.32.0", True),
        ("0.32.1", True),
        ("0.32.0+cpu", True),
        ("0.32.1.dev5+g0123", True),
        ("0.32", True),
        ("v0.32.0", True),
        ("0.33.0", True),
        ("0.33.1+cpu", True),
        ("0.31.9", False),
        ("0.34.0", False),
        ("0.320.0", False),
        ("1.0.32", False),
        ("10.32.0", False),
        ("dev", False),
        ("", False),
    ],
)
def test_supported_versions(version: str, supported: bool) -> None:
    assert seams.vllm_is_supported(version) is supported


def test_version_gate_stops_a_policy_alone(make_config, monkeypatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.1")
    assert make_config().scheduler_config.scheduler_cls is None
    with pytest.raises(RuntimeError) as error:
        make_config("speed-4")
    for part in ("0.34.1", "0.32.*", "0.33.*", "KVX_ALLOW_UNTESTED_VLLM=1"):
        assert part in str(error.value)
    monkeypatch.setenv("KVX_ALLOW_UNTESTED_VLLM", "1")
    assert make_config("speed-4").scheduler_config.scheduler_cls


def test_a_changed_seam_stops_a_policy_alone(make_config, monkeypatch) -> None:
    monkeypatch.setattr(InputProcessor, "resolve_watermarking", lambda self, request: None)
    assert make_config().scheduler_config.scheduler_cls is None
    with pytest.raises(RuntimeError, match=r"resolve_watermarking is \(self, request\), and was"):
        make_config("speed-4")


def test_wrap_once_wraps_each_kind_of_method_once() -> None:
    class Owner:
        @staticmethod
        def static(a: int) -> int:
            "Doc."
            return a

        @classmethod
        def of(cls, a: int) -> tuple:
            return cls, a

        def plain(self, a: int = 3) -> tuple:
            return self, a

    def twice(original):
        def wrapper(*args, **kwargs):
            return original(*args, **kwargs), "wrapped"

        return wrapper

    class Child(Owner):
        pass

    for name in ("static", "of", "plain"):
        before = inspect.signature(getattr(Owner, name))
        assert plugin.wrap_once(Owner, name, twice)
        assert not plugin.wrap_once(Owner, name, twice)
        assert inspect.signature(getattr(Owner, name)) == before
    owner = Owner()
    assert Owner.static.__doc__ == "Doc."
    assert owner.static(1) == (1, "wrapped")
    assert Child.of(2) == ((Child, 2), "wrapped")
    assert owner.plain() == ((owner, 3), "wrapped")
    with pytest.raises(AttributeError):
        plugin.wrap_once(Owner, "missing", twice)


def test_register_again_changes_nothing(make_config) -> None:
    make_config("speed-4")
    names = ("add_cli_args", "from_cli_args", "create_engine_config")
    before = [inspect.getattr_static(EngineArgs, name) for name in names]
    routes = vllm.plugins.load_endpoint_plugins
    plugin.register()
    make_config("speed-4")
    assert [inspect.getattr_static(EngineArgs, name) for name in names] == before
    assert vllm.plugins.load_endpoint_plugins is routes
    assert list(inspect.signature(EngineArgs.create_engine_config).parameters) == [
        "self",
        "usage_context",
        "headless",
    ]


def test_vllm_serve_ends_with_a_refusals_message(make_config, capsys, monkeypatch) -> None:
    def start(args: Namespace) -> None:
        if args.policy is None:
            raise ValueError("theirs")
        make_config(args.policy, dtype="float32")

    serve = serve_command(start)
    for policy, message in (
        ("speed-8", "kv_policy: speed-8: this model has 8 layers; use speed-1 .. speed-7"),
        (
            "fastkv:kv_rate=0.1",
            r"fastkv: tsp_layer of this model is not known, .* write tsp_layer=<int>, or",
        ),
    ):
        with pytest.raises(SystemExit) as ended:
            serve(Namespace(policy=policy))
        assert ended.value.code == 2 and ended.value.__suppress_context__
        [line] = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
        assert re.match(f"vllm serve: error: {message}", line)
        # In Python it can be caught.
        with pytest.raises(ValueError, match=message):
            make_config(policy, dtype="float32")
    monkeypatch.setattr(vllm, "__version__", "0.34.1")
    with pytest.raises(SystemExit):
        serve(Namespace(policy="speed-4"))
    assert "vllm serve: error: vllm-kvx works with" in capsys.readouterr().err
    # What is not ours, and for who looks for a bug, stays as it is.
    with pytest.raises(ValueError, match="theirs"):
        serve(Namespace(policy=None))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    with pytest.raises(RuntimeError, match="vllm-kvx works with"):
        serve(Namespace(policy="speed-4"))


def test_only_the_vllm_serve_command_ends_so(monkeypatch) -> None:
    parser = FlexibleArgumentParser()
    monkeypatch.delitem(sys.modules, "vllm.entrypoints.cli.serve", raising=False)
    EngineArgs.add_cli_args(parser)
    assert "vllm.entrypoints.cli.serve" not in sys.modules
    served: list[Namespace] = []
    command = SimpleNamespace(
        ServeSubcommand=type("ServeSubcommand", (), {"cmd": staticmethod(served.append)})
    )
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.cli.serve", command)
    EngineArgs.add_cli_args(parser := FlexibleArgumentParser())
    args = parser.parse_args(["--kv-policy", "speed-4", "--kv-request-policies", "off"])
    command.ServeSubcommand.cmd(args)
    # Before it runs: it may start servers of several ports, which get these arguments pickled.
    assert served == [args]
    assert args.additional_config == {"kv_policy": "speed-4", "kv_request_policies": "off"}
    other = parser.parse_args(["--kv-policy", "speed-4", "--additional-config.kv_policy", "full"])
    with pytest.raises(SystemExit):
        command.ServeSubcommand.cmd(other)
    assert served == [args]


def test_another_vllm_without_our_seams_still_serves(make_config, monkeypatch) -> None:
    def fail(*args):
        raise AttributeError("no such seam")

    monkeypatch.setattr(plugin, "wrap_once", fail)
    with pytest.raises(AttributeError):
        make_config()
    monkeypatch.setattr(vllm, "__version__", "0.40.0")
    assert make_config().scheduler_config.scheduler_cls is None


def test_another_vllm_without_our_seams_still_works(monkeypatch) -> None:
    def fail(*args):
        raise AttributeError("no such seam")

    monkeypatch.setattr(plugin, "wrap_once", fail)
    with pytest.raises(AttributeError):
        plugin.register()
    monkeypatch.setattr(vllm, "__version__", "0.40.0")
    plugin.register()


INERT = """
    import os
    import sys
    from fastapi import FastAPI
    from vllm.engine.arg_utils import EngineArgs
    import vllm.plugins

    def config(**additional):
        return EngineArgs(
            model=sys.argv[1], skip_tokenizer_init=True, load_format="dummy", enforce_eager=True,
            additional_config=additional,
        ).create_engine_config()

    for stock in (config(), config(theirs=1)):
        assert stock.scheduler_config.scheduler_cls is None
        assert stock.parallel_config.worker_cls.startswith("vllm.")
        assert stock.model_config.logits_processors is None

    def imported():
        ours = {name for name in sys.modules if name.startswith("vllm_kvx")}
        return {name.removeprefix("vllm_kvx").lstrip(".") for name in ours}

    idle = {"", "plugin", "config", "config.environment", "errors", "compat"}
    idle |= {f"compat.{name}" for name in ("cpu_mode", "serve_command", "wrapping")}
    if "KVX_CPU" in os.environ:
        quick = "batch", "interpreter", "kernels", "sampling", "semantics"
        idle |= {f"compat.quick_{name}" for name in quick}
    assert imported() <= idle, imported()
    # An HTTP server adds what looks at bodies, and no route.
    app = FastAPI()
    for endpoint in vllm.plugins.load_endpoint_plugins(("generate",)):
        endpoint.attach_router(app)
    assert len(app.routes) == len(FastAPI().routes) and not app.user_middleware
    looks = {"server", *(f"server.{name}" for name in (
        "without_policy", "bodies", "misplaced", "refusal_reasons"
    ))}
    assert imported() <= {*idle, *looks, "config.spelling", "config.quoting"}, imported()
    try:
        config(kv_policy="speed-4")
    except ValueError as error:
        print("REFUSED", error)
    else:
        print("ACCEPTED")
"""


def run(code: str, *args: str, **environment: str) -> str:
    """Output of `code` in a process of its own, out of the tests' CPU mode."""
    env = {k: v for k, v in os.environ.items() if k not in ("KVX_CPU", "TRITON_INTERPRET")}
    command = [sys.executable, "-c", textwrap.dedent(code), *args]
    result = subprocess.run(
        command, env=env | environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def test_inert_without_a_policy(llama: str) -> None:
    out = run(INERT, llama)
    if torch.cuda.is_available():
        assert "ACCEPTED" in out
    else:
        # Without the CPU mode vLLM runs Model Runner V1 on CPU.
        assert "REFUSED" in out
        assert "set KVX_CPU=1" in out


@pytest.mark.parametrize("value", ["", "0", "false", "False", "no", "NO", "off", " 0 "])
def test_cpu_mode_is_off(monkeypatch, value: str) -> None:
    monkeypatch.setenv("KVX_CPU", value)
    assert not cpu_mode_requested()
    check_platform("cuda")


@pytest.mark.parametrize("value", ["1", "true", "yes", "on"])
def test_cpu_mode_is_on_and_for_cpus(monkeypatch, value: str) -> None:
    monkeypatch.setenv("KVX_CPU", value)
    assert cpu_mode_requested()
    check_platform("cpu")
    for device in ("cuda", "xpu"):
        with pytest.raises(RuntimeError, match=f"KVX_CPU={value}.*runs on {device}.*unset KVX_CPU"):
            check_platform(device)


def test_the_plugin_refuses_cpu_mode_on_a_gpu(monkeypatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setenv("KVX_CPU", "1")
    monkeypatch.setattr(type(current_platform), "device_type", "cuda")
    with pytest.raises(RuntimeError, match="KVX_CPU=1"):
        plugin.register()
    monkeypatch.setenv("KVX_CPU", "off")
    plugin.register()


# By day servers and tools are started in the CPU mode all the time.
@nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="a mode of the CPU platform")
def test_cpu_mode_runs_model_runner_v2(llama: str) -> None:
    assert "ACCEPTED" in run(INERT, llama, KVX_CPU="1")
