"""Each of these requests ended SGLang's scheduler before it was checked; tests/system/serving/test_http.py does too."""

from __future__ import annotations

from typing import Any

import pytest

from kt_runtime.sglang_patch.frontend.checks import (
    check_lora_path,
    check_token_ids,
    check_top_logprobs,
)


@pytest.mark.parametrize(("ids", "wrong"), [([-1, 5], "-1"), ([5, 768], "768"), ([2**31], str(2**31))])
def test_token_outside_the_vocabulary_is_named_with_what_is_allowed(ids: list[int], wrong: str) -> None:
    with pytest.raises(ValueError, match=rf"token id {wrong} .* allowed are 0 to 767"):
        check_token_ids(ids, 768)


def test_first_and_last_token_of_the_vocabulary_pass_and_an_empty_prompt_does_not() -> None:
    check_token_ids([0, 767], 768)
    with pytest.raises(ValueError, match="no tokens"):
        check_token_ids([], 768)


@pytest.mark.parametrize(("number", "is_allowed"), [(None, True), (0, True), (768, True), (769, False), (-1, False)])
def test_no_more_top_logprobs_than_the_vocabulary_has(number: int | None, is_allowed: bool) -> None:
    if is_allowed:
        check_top_logprobs(number, 768)
    else:
        with pytest.raises(ValueError, match=f"top_logprobs_num is {number}"):
            check_top_logprobs(number, 768)


@pytest.mark.parametrize(
    ("lora_path", "num_prompts", "is_single", "is_allowed"),
    [
        ("a", 1, True, True),
        (None, 3, False, True),
        (["a", None], 2, False, True),
        (["a"], 1, True, False),
        (["a", "a", "a"], 2, False, False),
        ([], 2, False, False),
    ],
)
def test_adapter_list_has_one_entry_for_each_prompt(
    lora_path: Any, num_prompts: int, is_single: bool, is_allowed: bool
) -> None:
    if is_allowed:
        check_lora_path(lora_path, num_prompts, is_single)
    else:
        with pytest.raises(ValueError, match="one name, or a list with one for each prompt"):
            check_lora_path(lora_path, num_prompts, is_single)
