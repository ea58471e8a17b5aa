"""Another program takes the port while the model is loaded: the server ends and says so, and does not wait for ever."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

from system import forked_server

from kt_runtime.cli.server_process import free_port
from kt_runtime.serve.models.make_model import make_model

END_SECONDS = 120.0


def test_a_server_whose_port_was_taken_while_it_started_ends_and_says_so(tmp_path: Path) -> None:
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=2)
    port, log = free_port(), tmp_path / "server.log"
    command = [sys.executable, "-P", "-m", "kt_runtime.cli.main", "serve", "--model", str(tmp_path / "model")]
    options = [
        "--verbose",
        "--port",
        str(port),
        "--max-total-tokens",
        "1024",
        "--adapter-dir",
        str(tmp_path / "adapters"),
    ]
    started = forked_server.start([*command, *options], log)
    try:
        deadline = time.monotonic() + END_SECONDS
        while not (log.exists() and "starting SGLang's processes" in log.read_text(errors="replace")):
            assert started.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")
            time.sleep(0.05)
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))
            other.listen()
            assert started.wait(END_SECONDS) == 1
    finally:
        started.send_signal(9)
    lines = log.read_text(errors="replace")
    assert "another program has taken the server's port while the model was loaded" in lines
    assert "is ready" not in lines
