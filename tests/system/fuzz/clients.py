"""Clients that behave badly: killed while they read, slow, half there, aborting; and adapters that come and go."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from system.fuzz.asking import ask
from system.fuzz.bodies import HttpCase
from system.fuzz.templates import ADAPTERS

HALF_OPEN = 300
STREAM = {"input_ids": [9, 8, 7], "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
# Started with -S -E: it needs 20 ms. It opens a stream, reads a little and stays until it is killed.
KILLED_CLIENT = """
import socket, sys, time
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
s.sendall(bytes.fromhex(sys.argv[3]))
s.recv(200)
time.sleep(60)
"""


def post(name: str, path: str, body: dict[str, Any], method: str = "POST", **options: Any) -> HttpCase:
    return HttpCase(name, method, path, json.dumps(body).encode(), **options)


class BadClients:
    """One each of: killed in a stream, reading byte by byte, aborting by its name. `sent` is told of each request."""

    def __init__(self, address: tuple[str, int], seed: int, stop: Callable[[], bool]) -> None:
        self.address, self.random, self.stop = address, random.Random(f"clients/{seed}"), stop

    def half_open(self) -> list[socket.socket]:
        """Connections that begin a request and say no more."""
        begun = [
            b"",
            b"P",
            b"POST /generate HTTP/1.1\r\n",
            b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{",
        ]
        begun += [b"\x16\x03\x01\x02\x00\x01", b"GET /v1/realtime HTTP/1.1\r\nupgrade: websocket\r\n"]
        opened = []
        for number in range(HALF_OPEN):
            one = socket.create_connection(self.address, timeout=10.0)
            one.sendall(begun[number % len(begun)])
            opened.append(one)
        return opened

    def killed(self) -> None:
        while not self.stop():
            arguments = [self.address[0], str(self.address[1]), post("killed", "/generate", STREAM).wire().hex()]
            child = subprocess.Popen([sys.executable, "-S", "-E", "-c", KILLED_CLIENT, *arguments])
            time.sleep(0.03 + self.random.random() * 0.5)
            child.kill()
            child.wait()

    def slow(self) -> None:
        body = {**STREAM, "return_logprob": True, "top_logprobs_num": 20}
        while not self.stop():
            with contextlib.suppress(OSError), socket.socket() as opened:
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
                opened.settimeout(5.0)
                opened.connect(self.address)
                opened.sendall(post("slow", "/generate", body).wire())
                for _ in range(self.random.randrange(50)):
                    if not opened.recv(1) or self.stop():
                        break
                    time.sleep(0.1)

    def aborting(self) -> None:
        number = 0
        while not self.stop():
            number += 1
            name = f"aborted-{number}"
            with contextlib.suppress(OSError, http.client.HTTPException):
                self._aborted(name, self.random.random() * 0.4)

    def _aborted(self, name: str, after_s: float) -> None:
        timer = threading.Timer(after_s, self._abort, [name])
        timer.start()
        try:
            ask(
                self.address,
                post(name, "/generate", {**STREAM, "rid": name, "lora_path": self.random.choice([None, *ADAPTERS])}),
            )
        finally:
            timer.join()

    def _abort(self, name: str) -> None:
        with contextlib.suppress(OSError):
            ask(self.address, post(f"abort of {name}", "/abort_request", {"rid": name}))


class AdapterChurn:
    """Loads, asks, rolls back and takes away the adapters of `templates.ADAPTERS`, from directories good and broken."""

    def __init__(self, seed: int, good: tuple[str, ...], broken: tuple[str, ...]) -> None:
        self.random, self.good, self.broken, self.number = random.Random(f"churn/{seed}"), good, broken, 0

    def next(self) -> HttpCase:
        self.number += 1
        case, name = f"churn-{self.number}", self.random.choice(ADAPTERS)
        match self.random.choice(("load", "load", "broken", "rollback", "delete", "ask", "ask", "list")):
            case "load":
                return post(case, "/kt/adapters", {"name": name, "path": self.random.choice(self.good)})
            case "broken":
                return post(case, "/kt/adapters", {"name": name, "path": self.random.choice(self.broken)})
            case "rollback":
                return post(case, f"/kt/adapters/{name}/rollback", {})
            case "delete":
                return post(case, f"/kt/adapters/{name}", {}, "DELETE")
            case "list":
                return post(case, "/kt/adapters", {}, "GET")
        body = {"input_ids": [5, 6], "lora_path": name, "sampling_params": {"max_new_tokens": 12}}
        return post(case, "/generate", body)
