"""What stands in for a server, and replies with bytes that are no server's."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any


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
