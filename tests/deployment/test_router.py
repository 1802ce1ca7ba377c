"""Replicas behind vLLM's router: its metrics, where it is installed, and its page's figures."""

import json
import re
import shutil
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from benchmarks.common.about import KEYS
from benchmarks.serving import replicas
from benchmarks.serving.replicas import POLICIES, ROUTING, SESSIONS, Counted, Outcome

ROOT = Path(__file__).parents[2]
RESULTS = "cpu-replicas.json"


@pytest.fixture
def worker() -> Iterator[str]:
    """What answers a router as a server would, and its /metrics by a word of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(200)
            answer = b'{"choices": []}' if self.path != "/metrics" else b"of_a_server 1\n"
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_GET

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.skipif(shutil.which("vllm-router") is None, reason="vllm-router is not installed")
def test_the_routers_metrics_have_a_port_of_their_own(
    worker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At /metrics there, and not where requests go."""
    metrics = replicas.free_port()
    monkeypatch.setattr(replicas, "free_port", iter([replicas.free_port(), metrics]).__next__)
    with replicas.routed("vllm-router", "consistent_hash", [worker], tmp_path) as url:
        assert replicas.complete(url, {"prompt": "a"}, {"x-session-id": "s"}) == 200
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            own = answer.read().decode()
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            assert "of_a_server" in answer.read().decode()
    page = (ROOT / "docs" / "operate" / "scaling.md").read_text()
    named = re.findall(r"`(vllm_router_\w+)`", page)
    assert named
    for name in named:
        assert f"\n{name}{{" in own or f"\n{name} " in own, name


def outcome(found: list[int], **changed: int) -> Outcome:
    """Of two replicas of which each answered half, with `found` tokens in their caches."""
    asked = {policy: SESSIONS // 2 for policy in POLICIES} | changed
    return replicas.outcome_of([Counted(asked, each) for each in found])


def test_outcomes() -> None:
    whole = SESSIONS * (len(POLICIES) - 1) * 576
    every = outcome([whole // 2, whole // 2])
    assert every == Outcome([6, 6], dict.fromkeys(POLICIES, SESSIONS), 1.0)
    assert replicas.is_right("consistent_hash", every)
    half = outcome([whole // 4, whole // 4])
    assert half.found == 0.5
    assert replicas.is_right("round_robin", half)
    assert not replicas.is_right("consistent_hash", half)
    lost = outcome([whole // 2, whole // 2], full=0)
    assert not replicas.is_right("round_robin", lost)


def test_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = dict.fromkeys(ROUTING, outcome([100, 200]))
    kept = json.loads((ROOT / "benchmarks" / "results" / "serving" / RESULTS).read_text())
    found = replicas.figures(outcomes, "python -m benchmarks.serving.replicas", "0.1.17")
    assert set(KEYS) == set(found["about"]) == set(kept["about"])
    assert found["about"]["versions"]["vllm-router"] == "0.1.17"
    assert "vllm" in found["about"]["versions"]
    assert set(found) == set(kept) and set(found["routing"]) == set(kept["routing"])


def test_the_page_has_the_files_figures() -> None:
    page = (ROOT / "docs" / "operate" / "scaling.md").read_text()
    kept = json.loads((ROOT / "benchmarks" / "results" / "serving" / RESULTS).read_text())
    assert RESULTS in page
    for name, each in kept["routing"].items():
        first, second = each["requests_by_replica"]
        cells = rf"\| `{name}`[^|]*\| {first} and {second} \| {each['later_turns_found']:.0%} \|"
        assert re.search(cells, page), name
