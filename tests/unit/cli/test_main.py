from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kt_runtime import __version__
from kt_runtime.cli import main as module
from kt_runtime.errors import InvalidValueError, ServerUnreachableError

Run = Callable[..., subprocess.CompletedProcess[str]]


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def raise_error(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(module.importlib, "import_module", raise_error)


def test_help_lists_every_command_and_says_what_it_does(run: Run) -> None:
    result = run("--help")
    assert result.returncode == 0
    for name, line in module.COMMANDS.items():
        assert f"{name} " in result.stdout and line in result.stdout


def test_help_loads_nothing_that_takes_seconds() -> None:
    code = "import sys; from kt_runtime.cli.main import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Usage" in done.stdout, done.stderr
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert not loaded & {"torch", "transformers", "sglang", "datasets", "pyarrow", "numpy", "pandas"}


GARBAGE = """
import gc
from kt_runtime.cli.main import main

class Cycle:
    def __del__(self):
        print("collected", flush=True)

gc.disable()
for _ in range(2):
    made = Cycle()
    made.itself = made
    del made
gc.enable()
main(["--version"])
"""


def test_garbage_is_not_collected_when_a_command_has_ended() -> None:
    """Of the libraries that most commands import that takes more than a second."""
    done = subprocess.run([sys.executable, "-P", "-c", GARBAGE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.count("version"), done.stdout.count("collected")) == (0, 1, 0), done


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["models"], ["models", "show", "Kimi-K2"]])
def test_light_commands_import_no_heavy_library(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; from kt_runtime.cli.main import main; status = main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'sglang', 'numpy.testing', 'peft'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else status)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_version_is_the_packages(run_process: Run) -> None:
    assert run_process("--version").stdout.strip() == f"kt-runtime, version {__version__}"


def test_every_command_of_the_table_is_there() -> None:
    context = module.click.Context(module.cli)
    for name in module.COMMANDS:
        command = module.cli.get_command(context, name)
        assert isinstance(command, module.click.Command) and command.name == name


def test_a_misspelt_command_gets_the_nearest_one(run: Run) -> None:
    result = run("modles")
    assert result.returncode == 2
    assert result.stderr.startswith("kt-runtime: unknown command 'modles'; did you mean 'models'?")
    assert result.stdout == ""


def test_a_misspelt_option_is_the_users_mistake(run: Run) -> None:
    result = run("models", "make", "--sed", "1")
    assert result.returncode == 2
    assert "--seed" in result.stderr


@pytest.mark.slow
def test_the_users_mistake_gives_one_line_and_no_traceback(run_process: Run) -> None:
    result = run_process("models", "show", "nosuch")
    assert result.returncode == 2
    assert result.stderr.startswith("kt-runtime: model 'nosuch' is not on this machine; looked at: ")
    assert result.stderr.count("\n") == 1


def test_debug_shows_the_traceback(run: Run) -> None:
    result = run("--debug", "models", "show", "nosuch")
    assert result.returncode == 2
    assert "Traceback" in result.stderr and "NotFoundError" in result.stderr


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (InvalidValueError("x is 3; must be 2"), 2, "kt-runtime: x is 3; must be 2\n"),
        (ServerUnreachableError("no server"), 1, "kt-runtime: no server\n"),
        (ZeroDivisionError("oops"), 1, "kt-runtime: unexpected ZeroDivisionError: oops\n"),
        (KeyboardInterrupt(), 130, "kt-runtime: interrupted\n"),
    ],
)
def test_exit_status_and_message_follow_the_kind_of_error(
    error: BaseException,
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fail_with(monkeypatch, error)
    assert module.main(["models"]) == status
    shown = capsys.readouterr().err
    assert message in shown and "Traceback" not in shown
    assert ("--debug" in shown) == (status == 1)


def test_our_faults_traceback_is_shown_with_debug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, ZeroDivisionError("oops"))
    assert module.main(["--debug", "models"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kt_runtime.cli.main", "models", "show", "Kimi-K2", "--json"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.wait(60)
