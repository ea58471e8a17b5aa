"""What of a log is shown. The lines are those that SGLang 0.5.23's processes write."""

from __future__ import annotations

import io
import logging
import logging.config

import pytest

from kt_runtime.resident.progress import LOGGER_NAME, LayersRead
from kt_runtime.serve.console.records import LogReader, logging_config

TIME = "2026-01-02 03:04:05,678"


def shown(*lines: str) -> list[str]:
    reader = LogReader()
    return [text for line in lines if (text := reader.shown(line)) is not None]


def test_warnings_and_errors_are_shown_and_the_rest_is_not() -> None:
    assert shown(
        f"{TIME} INFO sglang.srt.managers.scheduler[12]: Load weight begin.",
        f"{TIME} WARNING sglang.srt.server_args[12]: something is odd",
        "[2026-01-02 03:04:05] INFO:     Uvicorn running on http://127.0.0.1:30000",
        f"{TIME} ERROR sglang.srt.managers.scheduler[12]: Scheduler hit an exception",
        "/site-packages/x.py:53: UserWarning: Only CUDA supports this.",
    )[:2] == ["warning: something is odd", "error: Scheduler hit an exception"]


def test_what_a_terminal_would_obey_is_not_shown_as_it_is() -> None:
    record = f"{TIME} ERROR sglang.srt.entrypoints[12]: no model \x1b]0;title\x07\x1b[2J\r\x9b2J\tnamed \u00fc"
    assert shown(record, "\x1b[1A") == ["error: no model ?]0;title??[2J??2J\tnamed \u00fc", "  ?[1A"]


def test_a_records_further_lines_go_with_it() -> None:
    record = f"{TIME} ERROR sglang.srt.managers.scheduler[12]: failed: Traceback (most recent call last):"
    further = ['  File "a.py", line 1, in f', "ValueError: no"]
    info = f"{TIME} INFO sglang[12]: of two"
    assert shown(record, *further, info, "lines") == [
        "error: failed: Traceback (most recent call last):",
        *(f"  {line}" for line in further),
    ]


def test_an_endless_record_is_cut() -> None:
    record = f"{TIME} ERROR sglang[12]: begin"
    assert len(shown(record, *["line"] * 500)) < 100


def test_what_every_server_here_warns_of_is_not_shown() -> None:
    assert shown(
        f"{TIME} WARNING sglang.srt.utils.common[1]: Fail to set RLIMIT_NOFILE: current limit exceeds maximum limit",
        f"{TIME} WARNING sglang.srt.models.registry[1]: Ignore import error when loading sglang.srt.models.mamba: no",
    ) == []  # fmt: skip


def test_uvicorns_errors_are_shown() -> None:
    assert shown("[2026-01-02 03:04:05] ERROR:    Exception in ASGI application", "Traceback", "ValueError") == [
        "error: Exception in ASGI application",
        "  Traceback",
        "  ValueError",
    ]


@pytest.fixture
def restored_logging() -> object:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


def test_the_format_that_processes_get_is_the_one_that_is_read(
    restored_logging: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at a level that hides our progress from everybody else."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    logging.config.dictConfig(logging_config("error"))
    logging.getLogger("sglang.srt").warning("hidden by the level")
    logging.getLogger("sglang.srt").error("a problem\nof two lines")
    clock = iter([0.0, 1.0, 6.0, 10.0])
    progress = LayersRead(2**30, lambda: next(clock))
    for layer in (1, 2, 3):
        progress(layer, 3)
    assert shown(*stream.getvalue().splitlines()) == [
        "error: a problem",
        "  of two lines",
        "experts: 2.0 GiB of 3.0 GiB read (2 of 3 layers), 341.3 MiB/s, 3 s left",
        "experts: 3.0 GiB of 3.0 GiB read (3 of 3 layers), 307.2 MiB/s",
    ]
    assert LOGGER_NAME in stream.getvalue()
