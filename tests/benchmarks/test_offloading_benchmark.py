"""`benchmarks.serving.offloading` against a server that only counts what it is asked."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving import offloading


class Connector(BaseHTTPRequestHandler):
    """Gives a prompt's tokens where its cache was emptied, at the second time of asking."""

    asked: list[list[int]]
    resets: int

    def _answer(self, body: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        given = sum(map(len, self.asked[2::3]))
        self._answer(f'vllm:external_prefix_cache_hits_total{{engine="0"}} {given}.0\n')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/reset_prefix_cache":
            type(self).resets += 1
            return self._answer(json.dumps({"success": self.resets % 2 == 0}))
        self.asked.append(json.loads(body)["prompt"])
        self._answer('data: {"a": 1}\n\ndata: {"a": 2}\n\ndata: [DONE]\n\n')

    def log_message(self, *_: Any) -> None:
        pass


def test_each_prompt_is_asked_new_cached_and_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading.time, "sleep", lambda _: None)
    handler = type("Handler", (Connector,), {"asked": [], "resets": 0})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        args = offloading.parse_args(["--output", "x.json", "--repeats", "2"])
        shape: Any = SimpleNamespace(vocab=500, layers=2, kv_heads=3, head_dim=4)
        url = f"http://127.0.0.1:{server.server_port}"
        found = offloading.measure(url, 10, shape, args)
        server.shutdown()
    assert found["given_tokens"] == 10 and found["prompt_bytes"] == 2 * 2 * 3 * 4 * 2 * 10
    assert all(found[f"{kind}_s"]["median"] > 0 for kind in ("new", "cached", "offloaded"))
    # One for warming up and two that count, three times each; emptied before every third.
    assert [handler.asked[i : i + 3] for i in (0, 3, 6)] == [
        [handler.asked[i]] * 3 for i in (0, 3, 6)
    ]
    assert len({tuple(prompt) for prompt in handler.asked}) == 3 and handler.resets == 6


def test_where_there_is_no_gpu_offloading_is_left_out() -> None:
    args = offloading.parse_args(["--output", "x.json", "--offload", "0", "--lengths", "96"])
    flags = offloading.flags_of("fier-64", {"model": "m"}, args)
    assert "--kv-offloading-size" not in flags and flags[-2:] == ["--kv-policy", "fier-64"]
    args = offloading.parse_args(["--output", "x.json"])
    flags = offloading.flags_of("stock", {"model": "m", "load_format": "dummy"}, args)
    assert flags[flags.index("--kv-offloading-size") + 1] == "64" and "--kv-policy" not in flags


def test_a_misspelt_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        offloading.parse_args(["--output", "x.json", "--servers", "stock", "fir-64"])
    assert "error: 'fir-64': unknown policy" in capsys.readouterr().err
