"""Starts the tests' servers as forks of one process that has imported SGLang: `kt-runtime serve` in 5 s instead of 20.

Only the imports are shared: the command line, the environment, all processes and their end are a server's own. The
command itself, in a new interpreter, is started by test_http.py (behind a key) and test_demo.py. Other commands that a
test interrupts or kills are such forks too (`start_command`), and the servers that they start; in a new interpreter
`kt-runtime train` is started by test_demo.py, `kt-runtime bench` by bench/test_experts.py. The trainers of fine-tuning
jobs are forks, but those of servers with NEW_TRAINERS in their environment (test_finetuning.py).
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil
import setproctitle
from reference.cache import faulty_disk
from reference.on_device import lost_device
from reference.ranks import network
from reference.server import changed_processes, hung_processes, signalled

from kt_runtime.cli import server_process
from kt_runtime.cli.main import main
from kt_runtime.serve.finetuning import trainer
from kt_runtime.serve.launch import settings_before_imports
from kt_runtime.serve.memory.machine import has_gpu
from kt_runtime.sglang_patch.plugin import PATCHES, TOUCHED_OTHERWISE

# SGLang's scheduler imports the modules of all models (1.3 s). SGLang's hooks patch what they have imported already.
IMPORTED = [
    "reference.server.forks.uncollected_imports",
    *("torch", "kt_runtime.serve.launch", "sglang.srt.entrypoints.http_server", "sglang.srt.models.registry"),
    *(f"kt_runtime.sglang_patch.{name}" for name in (*PATCHES, *TOUCHED_OTHERWISE)),
    *("kt_runtime.cli.serve", "sglang.srt.entrypoints.openai.serving_responses"),
    *("kt_runtime.serve.tinker.mount", "kt_runtime.serve.finetuning.mount", "kt_runtime.serve.registry.mount"),
    *("kt_runtime.cli.train.command", "kt_runtime.resident.server", "kt_runtime.sglang_patch.resident.turns"),
    *("system.forked_server", "reference.server.forks.frozen_imports"),
]
TESTS = Path(__file__).parents[1]
# What the interpreter, the loader and OpenMP read when a process starts: a fork can't have other values.
READ_AT_START = ("PYTHONPATH", "LD_PRELOAD", "OMP_NUM_THREADS")
NEW_TRAINERS = "NEW_TRAINERS"  # in a server's environment: its jobs' trainers are new interpreters, as for users
context = multiprocessing.get_context("forkserver")
T = TypeVar("T")
_at_start: dict[str, str | None] = {}
_start_command = server_process._start


class Forked:
    """What the tests and `server_process` use of subprocess.Popen."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._process = context.Process(target=target, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("kt-runtime", timeout or 0.0)
        return self.returncode


class ForkedScript(Forked):
    """`python SCRIPT ARGUMENT` as `bench.serve.peers` starts it. `stdout`: lines."""

    def __init__(self, script: Path, argument: str, environment: dict[str, str], log: IO[bytes]) -> None:
        reading, writing = context.Pipe(duplex=False)
        with writing, Connection(os.dup(log.fileno()), readable=False) as errors:
            super().__init__(_script, str(script), argument, environment, writing, errors)
        self.stdout = os.fdopen(os.dup(reading.fileno()), "r")
        reading.close()

    def __enter__(self) -> ForkedScript:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.wait()


class ForkedServer(Forked):
    def __init__(self, command: list[str], log_path: Path) -> None:
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        super().__init__(_serve, command[command.index("serve") :], environment, str(log_path), _address())


class ForkedTrainer(Forked):
    """In place of `finetuning.trainer._start`, in a server. `arguments`: -P -m MODULE, then those of `kt-runtime`."""

    def __init__(self, arguments: list[str], place: Path, environment: Mapping[str, str], output: int) -> None:
        within = os.environ.get(network.VARIABLE), os.getpid()
        with Connection(os.dup(output), readable=False) as writing:
            super().__init__(_train, arguments[3:], dict(environment), writing, str(place), *within)


class ForkedCommand(Forked):
    """`stdout`: lines of both its outputs."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        reading, writing = context.Pipe(duplex=False)
        super().__init__(_command, arguments, environment, writing, _address())
        writing.close()
        self.stdout = os.fdopen(os.dup(reading.fileno()), "r")
        reading.close()

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it says until it ends. `timeout`: seconds that it may take to end after its last word."""
        with self.stdout:
            said = self.stdout.read()
        self.wait(timeout)
        return said, None


def start_command(arguments: list[str], **variables: str) -> subprocess.Popen[str] | ForkedCommand:
    """`kt-runtime ARGUMENTS` in a process and session of its own, in this directory, with `variables` in its
    environment."""
    environment = {**os.environ, **variables}
    if _at_start and not has_gpu() and all(environment.get(name) == value for name, value in _at_start.items()):
        return ForkedCommand(arguments, environment)
    command = [sys.executable, "-P", "-m", "kt_runtime.cli.main", *arguments]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment, text=True, start_new_session=True, **streams)


def in_fork(function: Callable[[], T]) -> T:
    """What it returns in a process of its own. `function`: of a module, not a lambda."""
    with context.Pool(1) as pool:
        return pool.apply(function)


def start(command: list[str], log_path: Path) -> subprocess.Popen[bytes] | ForkedServer:
    """In place of `server_process._start`, after `import_all`. With a GPU SGLang is imported with other settings."""
    if has_gpu() or any(os.environ.get(name) != value for name, value in _at_start.items()):
        return _start_command(command, log_path)
    return ForkedServer(command, log_path)


def frontend_of(model_directory: Path) -> psutil.Process:
    """The frontend of the server of this model, whichever way it was started. Its processes are its children."""
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
        except psutil.NoSuchProcess:  # it has ended meanwhile; a zombie has none either
            continue
        if " serve " in command and str(model_directory) in command:
            return process
    raise AssertionError(f"no process serves {model_directory}")


def processes() -> set[psutil.Process]:
    """All that descend from this process, whichever way they were started."""
    return set(psutil.Process().children(recursive=True))


def import_all() -> None:
    """Starts the process that the servers are forks of. It ends with this process."""
    _at_start.update({name: os.environ.get(name) for name in READ_AT_START})
    before = dict(os.environ)
    os.environ.update(settings_before_imports(with_gpu=False))
    # The fork server imports what it finds without `sys.path` of this process, and leaves out what it does not find.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), before.get("PYTHONPATH")]))
    try:
        context.set_forkserver_preload(IMPORTED)
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _address() -> str | None:
    address: str | None = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    return address


def _serve(arguments: list[str], environment: dict[str, str], log_path: str, fork_server: str | None) -> None:
    os.setsid()
    server_process._end_with_parent()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    _become(arguments, environment)
    if NEW_TRAINERS not in environment:
        _follow(fork_server)
        trainer._start = ForkedTrainer  # type: ignore[assignment,misc]
    if environment.get(faulty_disk.CONTROL):
        faulty_disk.install()
    if environment.get(lost_device.CONTROL):
        lost_device.install()
    if environment.get(hung_processes.CONTROL):
        hung_processes.install()
    if namespace := environment.get(network.VARIABLE):
        network.enter(namespace)
    changed_processes.install()
    if emulated := sys.modules.get("device.backend"):  # torch has loaded it (tests/device)
        emulated.follow_environment()
    sys.exit(main())


def _follow(fork_server: str | None) -> None:
    """The process that this one is a fork of makes its forks too: multiprocessing would start another one."""
    forkserver._forkserver._forkserver_address = fork_server  # type: ignore[attr-defined]
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]


def _command(arguments: list[str], environment: dict[str, str], output: Connection, fork_server: str | None) -> None:
    _follow(fork_server)
    server_process._start = start  # type: ignore[assignment]
    _run(arguments, environment, output)


def _script(script: str, argument: str, environment: dict[str, str], output: Connection, errors: Connection) -> None:
    os.setsid()
    os.dup2(output.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    _become([], environment)
    sys.argv = [script, argument]
    runpy.run_path(script, run_name="__main__")


def _train(
    arguments: list[str],
    environment: dict[str, str],
    output: Connection,
    place: str,
    namespace: str | None,
    server: int,
) -> None:
    """`namespace`: the server's, in which the trainer reaches it."""
    threading.Thread(target=_end_with, args=(os.pidfd_open(server),), daemon=True).start()
    os.chdir(place)
    if namespace:
        network.enter(namespace)
    _run(arguments, environment, output)


def _end_with(server: int) -> None:
    """As the launcher of a new interpreter has it from the kernel: a fork's parent is the fork server."""
    select.select([server], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _run(arguments: list[str], environment: dict[str, str], output: Connection) -> None:
    os.setsid()
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background job
    _become(arguments, environment)
    signalled.install()
    sys.exit(main())


def _become(arguments: list[str], environment: dict[str, str]) -> None:
    """A process of its own, as after exec."""
    sys.argv = ["kt-runtime", *arguments]
    setproctitle.setproctitle(" ".join(sys.argv))  # before the environment changes, whose place in memory it needs
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it was read from another environment
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
