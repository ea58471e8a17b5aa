"""Selects the log lines that a user sees: warnings, errors, and kt-runtime's own progress.

SGLang's log format has no levels. `logging_config` gives each of SGLang's processes a format with levels; uvicorn,
which serves HTTP, sets its own format.
"""

from __future__ import annotations

import re
from typing import Any

from kt_runtime.resident.progress import LOGGER_NAME

_OURS = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) (\S+)\[\d+\]: (.*)")
_UVICORNS = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] ([A-Z]+): +(.*)")
# torch's C++ and its own Python loggers: [rank0]:W1122 21:13:18.670000 10309 torch/...] text
_TORCHS = re.compile(r"(?:\[rank\d+\]:)?[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ ")
_SHOWN = {"WARNING": "warning", "ERROR": "error", "CRITICAL": "error"}

# Warnings that every kt-runtime server causes, and that need no action.
EXPECTED = (
    "Cannot detect CUDA architecture",
    "Fail to set RLIMIT_NOFILE",
    "Ignore import error when loading sglang.srt.models",
    "Using fallback token IDs for yes/no",
    "init_cpu_threads_env and shared memory based AllReduce is disabled",
    "kill_process_tree called",
    "Disable prefill CUDA graph because cuda_graph_config resolved",
    "OpenAI Responses API (/v1/responses) disabled",
)
LONGEST_RECORD_LINES = 60
# A terminal interprets control characters, and SGLang's messages quote text from clients.
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")


def printable(line: str) -> str:
    return _CONTROL.sub("?", line)


class LogReader:
    """Reads a log line by line. A record may have several lines; its first line decides whether all are shown."""

    def __init__(self) -> None:
        self._is_shown = False
        self._num_lines = 0

    def shown(self, line: str) -> str | None:
        """The text to show for this line of the log, or None. Control characters are shown as `?`."""
        line = printable(line)
        if match := _OURS.fullmatch(line):
            level, name, text = match.groups()
            if name == LOGGER_NAME:
                self._is_shown = False
                return str(text)
            return self._begin(level, text)
        if match := _UVICORNS.fullmatch(line):
            return self._begin(match[1], match[2])
        if _TORCHS.match(line):
            self._is_shown = False
        self._num_lines += 1
        return f"  {line}" if self._is_shown and self._num_lines <= LONGEST_RECORD_LINES else None

    def _begin(self, level: str, text: str) -> str | None:
        self._is_shown = level in _SHOWN and not text.startswith(EXPECTED)
        self._num_lines = 0
        return f"{_SHOWN[level]}: {text}" if self._is_shown else None


def logging_config(level: str) -> dict[str, Any]:
    """The `logging.config.dictConfig` of each of SGLang's processes (SGLang reads it from SGLANG_LOGGING_CONFIG_PATH).

    `level`: SGLang's `--log-level`. Loggers that SGLang silences by default are silenced here too.
    """
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"levels": {"format": "%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s"}},
        "handlers": {"log": {"class": "logging.StreamHandler", "formatter": "levels"}},
        "root": {"level": level.upper(), "handlers": ["log"]},
        "loggers": {
            LOGGER_NAME: {"level": "INFO"},
            **{name: {"level": "WARNING"} for name in ("httpx", "httpcore", "huggingface_hub", "filelock")},
        },
    }
