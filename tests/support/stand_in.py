"""What stands in for a server, and replies with bytes that are no server's."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Semaphore, Thread
from typing import Any

import httpx


def http(status: int, body: Any = b"", *headers: str) -> bytes:
    """A reply as it is sent; a body that is not bytes is sent as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Said", f"Content-Length: {len(content)}", *headers]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + content


@contextmanager
def replying(reply: Callable[[str, bytes], bytes]) -> Iterator[str]:
    """The address of what replies with these bytes, by path and body, then closes."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as file:
                try:
                    path = file.readline().split(b" ")[1].decode()
                    length = 0
                    while (line := file.readline()).strip():
                        if line.lower().startswith(b"content-length:"):
                            length = int(line.split(b":")[1])
                    body = file.read(length)
                    # A client that is killed leaves half a request, which nobody answers.
                    if len(body) == length:
                        connection.sendall(reply(path, body))
                except (OSError, IndexError):
                    continue

    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@contextmanager
def handing_on(url: str, answers: int) -> Iterator[str]:
    """The address of what asks the server at `url`, and hands on so many of its answers to POST.

    The clients of all others wait for theirs in vain.
    """
    left, over = Semaphore(answers), Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {"Content-Type": "application/json"}
            path = f"{url}{self.path}"
            found = httpx.request(self.command, path, content=body, headers=headers, timeout=300)
            if self.command == "POST" and not left.acquire(blocking=False):
                over.wait()
                return
            with suppress(OSError):
                self.send_response(found.status_code)
                for name in ("Content-Type", "X-Request-Id"):
                    if name in found.headers:
                        self.send_header(name, found.headers[name])
                self.send_header("Content-Length", str(len(found.content)))
                self.end_headers()
                self.wfile.write(found.content)

        do_POST = do_GET

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            over.set()
            server.shutdown()
