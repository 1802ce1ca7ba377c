"""The images and compose files: linted, made of files that there are, and what checks images."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import pytest
import yaml

from vllm_kvx.compat.vllm_signatures import SUPPORTED_VLLM
from vllm_kvx.ops import library

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("Dockerfile*"))
COMPOSE = ROOT / "deploy" / "compose"
CHECK = ROOT / "docker" / "check_image.py"


@pytest.fixture(scope="module")
def check_image() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_image", CHECK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_hadolint_finds_nothing() -> None:
    assert [path.name for path in FILES] == ["Dockerfile", "Dockerfile.cpu", "Dockerfile.router"]
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run([hadolint, *FILES], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_is_copied_is_there(path: Path) -> None:
    """And reaches the builder: .dockerignore lets nothing pass but what it names."""
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    allowed = [line[1:] for line in ignored if line.startswith("!")]
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", path.read_text(), re.MULTILINE)
    assert copied
    for source in " ".join(copied).split():
        assert (ROOT / source).exists(), source
        assert any(source == name or source.startswith(f"{name}/") for name in allowed), source


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_image_ends_as_a_user_and_has_labels(path: Path) -> None:
    last = path.read_text().split("\nFROM ")[-1]
    assert re.findall(r"^USER (\S+)$", last, re.MULTILINE)[-1] == "10001:0"
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in last
    assert "HEALTHCHECK" in last and "ENTRYPOINT" in last


def test_the_default_release_is_served() -> None:
    for name in ("Dockerfile", "Dockerfile.cpu"):
        (version,) = set(re.findall(r"VLLM_VERSION=(\d+\.\d+)", _arguments(name)))
        assert version in SUPPORTED_VLLM


def _arguments(name: str) -> str:
    text = (ROOT / "docker" / name).read_text()
    return "\n".join(re.findall(r"^ARG .*$", text, re.MULTILINE))


# What an image checks of itself.


def test_this_environment_passes(check_image: ModuleType) -> None:
    assert check_image.problems("0", "") == []


def test_a_wrong_release(check_image: ModuleType) -> None:
    (says,) = check_image.problems("0", "0.1.2")
    assert says.endswith("and 0.1.2 was asked for")


def test_ops(check_image: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = tmp_path / "_kvx_ops.so"
    monkeypatch.setattr(library, "LIBRARY", built)
    monkeypatch.setenv("KVX_CACHE_ROOT", str(tmp_path / "cache"))
    (says,) = check_image.problems("80,90a", "")
    assert "not built" in says and "KVX_BUILD_OPS=0" in says
    assert check_image.problems("off", "") == []
    built.write_text(library.record(library.key_of(), ("80",)))
    assert check_image.problems("80", "") == []
    for asked in ("80,90a", "1"):
        assert check_image.problems(asked, "") == ["no CUDA ops for sm_90a, only for 80"]
    built.write_text(library.record("0123456789abcdef", ("80", "90a")))
    (says,) = check_image.problems("80,90a", "")
    assert "other sources" in says


@pytest.fixture
def answering() -> Iterator[tuple[str, list[int]]]:
    """A server's address, and the status that it answers with."""
    status = [200]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status[0])
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/health", status
    server.shutdown()
    server.server_close()


def test_health(answering: tuple[str, list[int]]) -> None:
    """vLLM answers 503 once its engine is dead."""
    url, status = answering

    def run(url: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "HEALTH_URL": url}
        command = [sys.executable, str(CHECK), "--health"]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    assert run(url).returncode == 0
    status[0] = 503
    done = run(url)
    assert done.returncode == 1 and "503" in done.stderr
    assert run("http://127.0.0.1:9/health").returncode == 1


# Compose.


class _Loader(yaml.SafeLoader):
    """Knows compose's own tags."""


def _tagged(loader: yaml.SafeLoader, tag: str, node: yaml.Node) -> Any:
    """What `!override` stands before, and nothing for `!reset`."""
    if tag == "override" and isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return None


_Loader.add_multi_constructor("!", _tagged)


def compose(name: str) -> dict[str, Any]:
    return yaml.load((COMPOSE / name).read_text(), _Loader)["services"]


def test_mounted_files_are_there() -> None:
    for service in compose("compose.yaml").values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE / source).exists(), source
    for name in ("compose.yaml", "cpu.yaml", "replicas.yaml"):
        for service in compose(name).values():
            if "build" in service:
                folder = COMPOSE / service["build"]["context"]
                assert (folder / service["build"]["dockerfile"]).is_file()


def test_variables_have_a_default_or_say_what_is_missing() -> None:
    """Else compose puts nothing in their place, with a warning among others."""
    page = (ROOT / "docs" / "operate" / "deployment.md").read_text()
    for path in COMPOSE.glob("*.yaml"):
        for name, rest in re.findall(r"\$\{?(\w+)([^}]*)", path.read_text()):
            assert rest.startswith((":-", ":?")), f"{path.name}: {name}"
            assert name in page, f"{name} is not on the page"


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    services = compose("compose.yaml")
    mounts = dict(v.split(":")[:2] for v in services["grafana"]["volumes"])
    provisioning = COMPOSE / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services
    (provider,) = yaml.safe_load((provisioning / "dashboards/vllm-kvx.yaml").read_text())[
        "providers"
    ]
    target = mounts["../helm/monitoring/dashboard.json"]
    assert target.startswith(provider["options"]["path"])
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == target


def job(settings: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (each for each in settings["scrape_configs"] if each["job_name"] == name)
    return found


def test_prometheus_finds_servers_and_alerts() -> None:
    services = compose("compose.yaml")
    settings = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())
    mounts = dict(v.split(":")[:2] for v in services["prometheus"]["volumes"])
    assert settings["rule_files"] == [mounts["../helm/monitoring/alerts.yaml"]]
    (found,) = job(settings, "vllm-kvx")["dns_sd_configs"]
    for service in (services["vllm"], compose("replicas.yaml")["vllm-1"]):
        assert service["networks"]["default"]["aliases"] == found["names"]


def test_compose_waits_for_answers() -> None:
    """Docker sends SIGTERM, waits, and kills: the server has to drain within that time."""
    service = compose("compose.yaml")["vllm"]
    (minutes,) = re.fullmatch(r"(\d+)m", service["stop_grace_period"]).groups()
    for command in (service["command"], compose("cpu.yaml")["vllm"]["command"]):
        (flag,) = (each for each in command if each.startswith("--shutdown-timeout="))
        assert 0 < int(flag.partition("=")[2]) <= 60 * int(minutes) - 20
    assert compose("replicas.yaml")["vllm-1"]["extends"]["service"] == "vllm"
    assert "command" not in compose("replicas.yaml")["vllm-1"]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu", "Dockerfile.router"])
def test_a_containers_signal_reaches_its_server(name: str) -> None:
    """A list starts the program itself; text would start a shell, which keeps SIGTERM to itself."""
    text = (ROOT / "docker" / name).read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    assert json.loads(entry)[0] in ("vllm", "vllm-router")
    assert "STOPSIGNAL" not in text


def test_the_router_has_every_replica() -> None:
    services = compose("replicas.yaml")
    urls = [a for a in services["router"]["command"] if a.startswith("http")]
    assert urls == ["http://vllm:8000", "http://vllm-1:8000"]
    assert {*services["router"]["depends_on"]} == {"vllm", "vllm-1"}


def test_prometheus_finds_the_router() -> None:
    """At the port of its own metrics, which is not the one of requests, and only where it runs."""
    services = compose("replicas.yaml")
    settings = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())
    (found,) = job(settings, "vllm-router")["file_sd_configs"]
    (path,) = found["files"]
    (mount,) = services["prometheus"]["volumes"]
    source, target, mode = mount.split(":")
    assert (target, mode) == (path, "ro") and path.endswith(".yaml")
    assert path not in str(compose("compose.yaml")), "without a router Prometheus asks nobody"
    ((address,),) = (each["targets"] for each in yaml.safe_load((COMPOSE / source).read_text()))
    host, port = address.split(":")
    assert host == "router" and host in services
    command = dict(a.partition("=")[::2] for a in services["router"]["command"])
    assert command["--prometheus-port"] == port != command["--port"]
    assert command["--prometheus-host"] == "0.0.0.0"
    (exposed,) = re.findall(
        r"^EXPOSE (.*)$", (ROOT / "docker/Dockerfile.router").read_text(), re.MULTILINE
    )
    assert port in exposed.split()
    assert not any(port in published for published in services["router"]["ports"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_configuration(tmp_path: Path) -> None:
    text = (COMPOSE / "prometheus.yaml").read_text()
    alerts = ROOT / "deploy/helm/monitoring/alerts.yaml"
    targets = COMPOSE / "router-targets.yaml"
    for path, here in (("alerts.yaml", alerts), ("router.yaml", targets)):
        text = text.replace(f"/etc/prometheus/{path}", str(here))
    (tmp_path / "prometheus.yaml").write_text(text)
    command = ["promtool", "check", "config", str(tmp_path / "prometheus.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
