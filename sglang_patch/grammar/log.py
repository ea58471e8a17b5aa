"""A client's grammar is cut to a few hundred characters in the log.

SGLang 0.5.23 logs a grammar whole, each time that it fails to compile or refuses a token: megabytes for each request of
whoever sends them. Symbols: the loggers `logger` of the modules below. What a module writes otherwise is short.
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
HEAD_CHARACTERS, TAIL_CHARACTERS = 300, 200  # the reason stands at the end


class Shortening(logging.Filter):
    """Passes every record on, a long one with its middle left out."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = shortened(record.getMessage()), None
        return True


SHORTENING = Shortening()


def shorten_logs() -> None:
    for name in SYMBOLS:
        pkgutil.resolve_name(name).addFilter(SHORTENING)  # once: a logger does not take the same filter again


def shortened(message: str) -> str:
    left_out = len(message) - HEAD_CHARACTERS - TAIL_CHARACTERS
    if left_out <= 0:
        return message
    return f"{message[:HEAD_CHARACTERS]} [... {left_out:,} characters ...] {message[-TAIL_CHARACTERS:]}"
