"""What a client's pattern may cost is bounded when it arrives; SGLang searches with it in the scheduler's thread."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from kt_runtime.sglang_patch.grammar.stop_patterns import WINDOW_TOKENS, compiled, window_tokens


@pytest.fixture
def parameters(patched_sglang: None) -> ModuleType:
    from sglang.srt.sampling import sampling_params

    return sampling_params


def test_the_scheduler_searches_in_linear_time(patched_sglang: None) -> None:
    from sglang.srt.managers import schedule_batch

    # Python's `re` would take 2**5000 steps
    assert schedule_batch.re.search("(a+)+b$", "a" * 5000) is None
    assert schedule_batch.re.search("(a+)+b$", "a" * 5000 + "b") is not None
    assert schedule_batch.re is not re
    with pytest.raises(schedule_batch.re.error):
        schedule_batch.re.search("(", "text")


@pytest.mark.parametrize("pattern", ["(", r"(a)\1", "(?=a)", "(a{1000}){1000}", "((a?){30}){33}b", "[z-a]"])
def test_a_pattern_that_is_not_allowed_is_refused_with_the_reason(parameters: ModuleType, pattern: str) -> None:
    with pytest.raises(ValueError, match=r"stop_regex .* is refused: .*; allowed is RE2's syntax"):
        parameters.SamplingParams(stop_regex=pattern).normalize(None)


def test_only_the_end_of_a_long_answer_is_searched(parameters: ModuleType) -> None:
    assert parameters.get_max_seq_length("abc") == 3
    assert parameters.get_max_seq_length("a+b") == WINDOW_TOKENS
    assert parameters.get_max_seq_length("(a{900}){1,}") == WINDOW_TOKENS


def test_syntax_that_only_re2_knows_is_searched_in_the_whole_window() -> None:
    def python_cannot(pattern: str) -> int:
        raise re.error("bad escape")

    assert compiled(r"\pN+").search("room 5") is not None
    assert window_tokens(python_cannot, r"\pN+") == WINDOW_TOKENS


def test_a_request_has_few_patterns(parameters: ModuleType) -> None:
    with pytest.raises(ValueError, match="at most 2 stop_regex"):
        parameters.SamplingParams(stop_regex=["a", "b", "c"]).normalize(None)
