"""Where a server may listen, and who else may."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.wire import WireServer, codec
from kt_runtime.wire.messages import GetStatus


def test_socket_is_0600_in_a_0700_directory_that_is_created(
    socket_directory: Path, make_server: Callable[..., WireServer]
) -> None:
    path = socket_directory / "new" / "r.sock"
    server = make_server(f"ipc://{path}")
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert server.address == f"ipc://{path}"
    server.close()
    assert not path.exists()


def test_a_directory_that_others_may_enter_is_refused(socket_directory: Path) -> None:
    socket_directory.chmod(0o755)
    with pytest.raises(InvalidValueError, match=r"mode 0755 .* must be 0700"):
        WireServer(f"ipc://{socket_directory}/r.sock")
    assert list(socket_directory.iterdir()) == []


def test_a_second_server_is_refused_and_the_first_continues(server: WireServer, peer: Any) -> None:
    with pytest.raises(ConflictError, match=f"in use by process {os.getpid()}"):
        WireServer(server.address)
    peer.send(codec.encode(GetStatus(request_id="a")))
    assert server.wait(60)
    assert [incoming.request_id for incoming in server.take()] == ["a"]


def test_an_address_is_free_again_after_close(address: str, make_server: Callable[..., WireServer]) -> None:
    make_server().close()
    make_server().close()


def test_a_killed_servers_socket_is_taken_over(address: str, make_server: Callable[..., WireServer]) -> None:
    program = (
        "import sys, time; from kt_runtime.wire import WireServer; server = WireServer(sys.argv[1]); "
        "print('up', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        with pytest.raises(ConflictError, match=f"process {process.pid}"):
            WireServer(address)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert stat.S_ISSOCK(Path(address.removeprefix("ipc://")).stat().st_mode)  # left behind
    make_server()


def test_a_file_that_is_not_a_socket_is_not_deleted(address: str) -> None:
    path = Path(address.removeprefix("ipc://"))
    path.write_text("precious")
    with pytest.raises(InvalidValueError, match="not a socket"):
        WireServer(address)
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    "bad, reason",
    [
        ("ipc://relative.sock", "absolute path"),
        ("ipc://@abstract", "absolute path"),
        ("ipc://*", "absolute path"),
        ("ipc:///tmp/" + "x" * 120, "107 bytes"),
        ("inproc://x", "must be ipc://"),
        ("/tmp/x.sock", "must be ipc://"),
        ("tcp://127.0.0.1:5555", "must be ipc://"),
    ],
)
def test_a_bad_address_is_refused(bad: str, reason: str) -> None:
    with pytest.raises(InvalidValueError, match=reason):
        WireServer(bad)
