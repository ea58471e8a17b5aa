"""Shortens clients' grammars in the log to a few hundred characters.

SGLang 0.5.23 logs the whole grammar each time that it fails to compile or refuses a token, so a client can cause
megabytes of log per request. Symbols: the loggers `logger` of the modules below. Their other messages are short.
"""

from __future__ import annotations

import logging
import pkgutil

SYMBOLS = (
    "sglang.srt.constrained.base_grammar_backend.logger",
    "sglang.srt.constrained.grammar_manager.logger",
    "sglang.srt.constrained.xgrammar_backend.logger",
    "sglang.srt.managers.schedule_batch.logger",
    "sglang.srt.managers.scheduler_components.batch_result_processor.logger",
)
HEAD_CHARACTERS, TAIL_CHARACTERS = 300, 200  # the reason is at the end of the message


class Shortening(logging.Filter):
    """Passes every record; removes the middle of a long message."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = shortened(record.getMessage()), None
        return True


SHORTENING = Shortening()


def shorten_logs() -> None:
    for name in SYMBOLS:
        pkgutil.resolve_name(name).addFilter(SHORTENING)  # idempotent: a logger ignores a filter that it has already


def shortened(message: str) -> str:
    left_out = len(message) - HEAD_CHARACTERS - TAIL_CHARACTERS
    if left_out <= 0:
        return message
    return f"{message[:HEAD_CHARACTERS]} [... {left_out:,} characters ...] {message[-TAIL_CHARACTERS:]}"
