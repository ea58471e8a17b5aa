"""OpenAI's graders of method reinforcement, as built-in rewards of `stage: grpo`. Nothing of a grader is executed.

A grader compares the sampled answer with a reference, a text with places such as {{item.answer}} that each row of the
training file fills.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.requests.bodies.bounds import Body, Name
from kt_runtime.serve.requests.checks.checking import fitted, shortened

REWARDS = {"eq": "exact_match", "like": "contains", "ilike": "contains_any_case"}
"""The reward in `train/rollouts/rewards.py` of each operation of a string_check."""
REFUSED = {
    "python": "the server runs no code of a request",
    "score_model": "no model judges answers here",
    "label_model": "no model judges answers here",
    "text_similarity": "its metrics are no built-in rewards",
    "multi": "a job has one grader",
}
ALLOWED = (
    'allowed is {"type": "string_check", "input": "{{sample.output_text}}", "reference": "{{item.FIELD}}", '
    '"operation": "eq", "like" or "ilike"}'
)
MOST_CHARACTERS = 4096
_PLACE = re.compile(r"\{\{\s*([^{}]*?)\s*\}\}")


class StringCheck(Body, kw_only=True):
    """`input`: what is compared with `reference`. `name`: the client's own."""

    type: Literal["string_check"]
    name: Name = "string_check"
    input: Annotated[str, Meta(max_length=MOST_CHARACTERS)]
    reference: Annotated[str, Meta(min_length=1, max_length=MOST_CHARACTERS)]
    operation: Literal["eq", "ne", "like", "ilike"]

    @property
    def reward(self) -> str:
        return REWARDS[self.operation]


def read_grader(grader: Mapping[str, Any]) -> StringCheck:
    """Raises InvalidValueError for a grader that is no built-in reward, Refusal for wrong fields of a string_check."""
    kind = grader.get("type")
    if kind in REFUSED:
        raise InvalidValueError(f"grader: type {kind!r}: {REFUSED[kind]}; {ALLOWED}")
    if kind != "string_check":
        raise InvalidValueError(f"grader: type {shortened(kind)}: no such grader; {ALLOWED}")
    check = fitted(dict(grader), StringCheck)
    if check.operation == "ne":
        raise InvalidValueError(f"grader: operation 'ne' rewards every answer but one; {ALLOWED}")
    if _PLACE.fullmatch(check.input.strip()) is None or _PLACE.findall(check.input) != ["sample.output_text"]:
        raise InvalidValueError(
            f"grader: input {shortened(check.input)}: must be {{{{sample.output_text}}}}, the sampled answer"
        )
    for name in _PLACE.findall(check.reference):
        if not re.fullmatch(r"item(\.\w+)+", name):
            raise InvalidValueError(
                f"grader: reference: {{{{{name[:80]}}}}}: a reference names fields of the row: {{{{item.answer}}}}"
            )
    return check


def reference_of(check: StringCheck, item: Mapping[str, Any]) -> str:
    """The reference of one row. Raises InvalidValueError for a row without a field that the reference names."""

    def value(found: re.Match[str]) -> str:
        name = found[1]
        inner: Any = item
        for step in name.split(".")[1:]:
            if not isinstance(inner, dict) or inner.get(step) is None:
                raise InvalidValueError(f"no {name}, which the grader's reference names")
            inner = inner[step]
        return inner if isinstance(inner, str) else json.dumps(inner, ensure_ascii=False)

    text = _PLACE.sub(value, check.reference)
    if not text.strip():
        raise InvalidValueError("the grader's reference is blank")
    return text
