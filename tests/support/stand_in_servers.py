"""Scripts that stand in for ``vllm serve`` and its engine: what they say when they are to end."""

import time
from pathlib import Path

# vLLM's server heeds no signal while it waits for its engine, and ends when the engine does.
STARTS = """
import signal, subprocess, sys

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda *_: None)
subprocess.Popen([sys.executable, sys.argv[1]], stdin=subprocess.PIPE).wait()
print("the server ends by itself", file=sys.stderr, flush=True)
"""
# Once it is up, it ends its engine when nothing is left to answer.
SERVES = """
import signal, socketserver, subprocess, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass


def value_of(flag):
    return sys.argv[sys.argv.index(flag) + 1]


if "--uds" in sys.argv:
    httpd = socketserver.ThreadingUnixStreamServer(value_of("--uds"), Handler)
else:
    httpd = HTTPServer(("127.0.0.1", int(value_of("--port"))), Handler)
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=httpd.shutdown).start())
engine = subprocess.Popen([sys.executable, sys.argv[1]], stdin=subprocess.PIPE, text=True)
httpd.serve_forever()
engine.communicate("the last answer")
print("the server ends by itself", file=sys.stderr, flush=True)
"""
ENGINE = """
import signal, sys


def say(text):
    print(text, file=sys.stderr, flush=True)


def end(number, frame):
    say(f"the engine gets {signal.Signals(number).name}")
    sys.exit()


signal.signal(signal.SIGINT, end)
signal.signal(signal.SIGTERM, end)
say("the engine is there")
say(f"the engine ends after {sys.stdin.read()}")
"""


def write_scripts(server: str, folder: Path) -> tuple[Path, Path]:
    """The server's script and its engine's, which it is given as its first argument."""
    scripts = folder / "serve.py", folder / "engine.py"
    for script, text in zip(scripts, (server, ENGINE), strict=True):
        script.write_text(text)
    return scripts


def wait_for_engine(log: Path) -> None:
    """Raises AssertionError if the engine does not say that it is there."""
    end = time.monotonic() + 60
    while not log.exists() or "the engine is there" not in log.read_text():
        assert time.monotonic() < end
        time.sleep(0.01)


def said(log: Path) -> list[str]:
    """What server and engine said, in order."""
    return [line for line in log.read_text().splitlines() if line.startswith("the ")]
