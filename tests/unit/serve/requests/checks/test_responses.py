from __future__ import annotations

import pytest

from kt_runtime.serve.requests.bodies.completions import TextCompletion
from kt_runtime.serve.requests.bodies.responses import Responses
from kt_runtime.serve.requests.checks.refusal import Refusal
from kt_runtime.serve.requests.checks.responses import ResponsesThere


def test_responses_that_sglang_could_not_prepare_are_refused_and_other_routes_not() -> None:
    asked = Responses(model="m", input="hello")
    ResponsesThere(lambda: True).check(asked)
    absent = ResponsesThere(lambda: False)
    absent.check(TextCompletion(model="m", prompt="hello"))
    with pytest.raises(Refusal, match="/v1/chat/completions answers") as refused:
        absent.check(asked)
    assert refused.value.status == 501
