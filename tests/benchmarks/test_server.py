"""A server in the background, by a stand-in for ``vllm serve``."""

import os
import sys
import urllib.request
from pathlib import Path

from benchmarks.common.server import serving

# Before it listens, as vLLM's server does, it asks for its port as any other program might.
SERVE = """
import socket, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

address = "127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])
with socket.socket() as other:
    try:
        other.bind(address)
    except OSError:
        print("nobody else gets it", flush=True)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


HTTPServer(address, Handler).serve_forever()
"""


def test_the_port_is_kept_until_the_server_listens(tmp_path: Path) -> None:
    script, log = tmp_path / "serve.py", tmp_path / "log"
    script.write_text(SERVE)
    with (
        serving([], log, os.environ, vllm=[sys.executable, str(script)]) as url,
        urllib.request.urlopen(f"{url}/health", timeout=60) as answer,
    ):
        assert answer.status == 200
    assert "nobody else gets it" in log.read_text()
