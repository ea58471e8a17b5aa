"""A grammar of any length makes a log entry of some hundred characters, with the reason in it."""

from __future__ import annotations

import logging

import pytest
from sglang.srt.constrained import xgrammar_backend

from kt_runtime.sglang_patch.grammar.log import SHORTENING, shorten_logs, shortened


def test_a_refused_grammar_is_cut_and_its_reason_kept(caplog: pytest.LogCaptureFixture) -> None:
    shorten_logs()
    shorten_logs()
    try:
        assert xgrammar_backend.logger.filters.count(SHORTENING) == 1
        with caplog.at_level(logging.ERROR):
            xgrammar_backend.logger.error(f"Hit invalid regex: key_string={'a' * 10_000_000!r}, e=wrong")
            xgrammar_backend.logger.error("short %s", "one")
        cut, short = (record.getMessage() for record in caplog.records)
    finally:
        xgrammar_backend.logger.removeFilter(SHORTENING)
    assert len(cut) < 600
    assert cut.startswith("Hit invalid regex: key_string='aaa") and cut.endswith("aaa', e=wrong")
    assert "[... 9,999,5" in cut
    assert short == "short one"


def test_what_is_short_stays_whole() -> None:
    assert shortened("a" * 500) == "a" * 500
    assert len(shortened("a" * 501)) < 600
