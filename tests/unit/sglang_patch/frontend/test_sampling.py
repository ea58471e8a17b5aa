"""Each of these values failed behind SGLang's frontend, or has no bound there."""

from __future__ import annotations

from typing import Any

import pytest

from kt_runtime.sglang_patch.frontend.sampling import check_choices, check_sampling

VOCABULARY = 768
NAN, INF = float("nan"), float("inf")


def each(names: tuple[str, ...], *values: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name in names for value in values]


WRONG: list[tuple[str, Any]] = [
    *each(("top_k",), *(2**31, 2**63, -2, 1.5, True, "1")),
    *each(("max_new_tokens",), *(2**31, 10**400, -1, [], False)),
    *each(("min_new_tokens",), *(2**63, -1, "x")),
    *each(("n",), *(0, 129, 10**9, [1])),
    *each(("stream_interval",), *(0, -1, 2**31)),
    *each(("sampling_seed",), *(2**63, -(2**63) - 1, 0.5, "x")),
    *each(("temperature", "top_p", "min_p"), *(NAN, INF, 10**400, "1", [], True)),
    *each(("frequency_penalty",), *(NAN, -INF, {})),
    *each(("presence_penalty",), *(NAN, "0")),
    *each(("repetition_penalty",), *(NAN, 1e-300, 0, -1)),
    *each(("ignore_eos",), *(1, "x")),
    *each(("skip_special_tokens",), *(0, [])),
    *each(("json_schema", "regex", "ebnf", "structural_tag"), *(5, {"a": 1}, [])),
    *each(("beam_width",), *(2, 0, "1", True)),
    *each(("stop_token_ids",), *(5, [2**31], ["x"], [1.5], [-1], [5, VOCABULARY])),
    *each(("logit_bias",), *([], {"x": 1}, {"5": "x"}, {"5": NAN}, {"5": 1e31}, {"-1": 1}, {"٥": 1})),
    ("logit_bias", {"0" * k + str(token): 1 for k in range(2) for token in range(VOCABULARY)}),
    *each(("stop",), *(5, [5], "x" * 4097, ["x" * 3000, "y" * 3000])),
    *each(("stop_regex",), *(5, [None])),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: str(value)[:30])
def test_a_wrong_value_is_named_with_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        check_sampling({"max_new_tokens": 4, name: value}, VOCABULARY)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("parameters", [5, "x", [], [1]])
def test_parameters_must_be_an_object(parameters: Any) -> None:
    with pytest.raises(ValueError, match="must be an object"):
        check_sampling(parameters, VOCABULARY)


def test_what_clients_send_passes() -> None:
    check_sampling(None, VOCABULARY)
    check_sampling({}, VOCABULARY)
    check_sampling(
        {
            "max_new_tokens": 64, "min_new_tokens": 0, "temperature": 0, "top_p": 0.9, "top_k": -1, "min_p": 0.0,
            "frequency_penalty": -2, "presence_penalty": 2.0, "repetition_penalty": 1.1, "n": 128, "ignore_eos": True,
            "stop": ["\n", "END"], "stop_regex": "[0-9]+", "stop_token_ids": [1, None, 700], "sampling_seed": -1,
            "logit_bias": {"5": -100, "767": 1.5}, "regex": "a*", "skip_special_tokens": False, "beam_width": None,
            "stream_interval": 1, "temperature_of_another_version": 1,
        },
        VOCABULARY,
    )  # fmt: skip


def test_choices_are_counted_before_they_are_made() -> None:
    check_choices(None)
    check_choices([{"n": 128}, {}, None])
    for wrong in ({"n": 10**9}, [{"n": 1}, {"n": 129}], {"n": None}):
        with pytest.raises(ValueError, match="n is"):
            check_choices(wrong)
