"""An HTTP server that fails on purpose. What a real server can be made to do is tested with a real one."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any]
"""Status, and what to send: an object as JSON, bytes as they are, None to close the connection without an answer."""


@dataclass
class FakeServer:
    """`answer(path, body, number)` is asked for the `number`-th request (from 1) of all. `requests`: (path, body)."""

    answer: Callable[[str, Any, int], Answer]
    url: str = ""
    requests: list[tuple[str, Any]] = field(default_factory=list)
    most_at_once: int = 0
    _under_way: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length") or 0)
        body = json.loads(handler.rfile.read(length)) if length else None
        with self._lock:
            self.requests.append((handler.path, body))
            number = len(self.requests)
            self._under_way += 1
            self.most_at_once = max(self.most_at_once, self._under_way)
        try:
            status, value = self.answer(handler.path, body, number)
        finally:
            with self._lock:
                self._under_way -= 1
        if value is None:
            handler.close_connection = True
            return
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)


@contextlib.contextmanager
def fake_server(answer: Callable[[str, Any, int], Answer]) -> Iterator[FakeServer]:
    fake = FakeServer(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fake.respond(self)

        do_POST = do_GET
        do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        fake.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()
