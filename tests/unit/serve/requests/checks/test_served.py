"""Whether what a request names is served."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kt_runtime.serve.requests.bodies.completions import TextCompletion
from kt_runtime.serve.requests.bodies.control import LoadAdapter
from kt_runtime.serve.requests.bodies.generate import LogprobFields, VertexGenerate
from kt_runtime.serve.requests.bodies.responses import Responses
from kt_runtime.serve.requests.bodies.scoring import FunctionCallText, ReasoningText
from kt_runtime.serve.requests.checks.refusal import Refusal
from kt_runtime.serve.requests.checks.served import KnownParsers, ResponsesThere, ServedModels


def models(*, any_name: bool = False) -> ServedModels:
    served = ServedModels("org/base", any_name=any_name)
    served.adapters = lambda: {"mine": "id", "other": "id"}
    return served


@pytest.mark.parametrize("model", [None, "default", "org/base", "mine", "org/base:mine"])
def test_model_adapter_and_both_are_served(model: str | None) -> None:
    models().check(SimpleNamespace(model=model, lora_path=[None, "other"]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "mime"}, "unknown model 'mime'; did you mean 'mine'"),
        ({"model": "org/basis"}, "did you mean 'org/base'"),
        ({"model": "org/base:mime"}, "unknown adapter 'mime'; did you mean 'mine'"),
        ({"model": "gpt-4o:mine"}, "unknown model 'gpt-4o:mine'"),
        ({"model": ""}, "unknown model ''"),
        ({"lora_path": "mime"}, "unknown adapter 'mime'; did you mean 'mine'"),
        ({"lora_path": ["mine", "x"]}, "unknown adapter 'x'; served are: 'mine', 'other'"),
        ({"model": "z" * 1000}, "z"),
    ],
)
def test_other_names_are_404_with_the_nearest(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal) as raised:
        models().check(SimpleNamespace(**fields))
    assert raised.value.status == 404 and message in raised.value.message and len(raised.value.message) < 500


def test_adapter_that_is_loaded_is_named_by_its_path_and_vertexs_by_its_parameters() -> None:
    models().check(LoadAdapter(lora_name="new", lora_path="/a/directory"))
    with pytest.raises(Refusal, match="unknown adapter 'x'"):
        models().check(VertexGenerate(instances=[], parameters=LogprobFields(lora_path="x")))


def test_before_the_server_has_started_no_adapter_is_served() -> None:
    with pytest.raises(Refusal, match="served are: none"):
        ServedModels("base").check(SimpleNamespace(lora_path="mine"))


def test_any_model_name_still_finds_no_unknown_adapter() -> None:
    models(any_name=True).check(SimpleNamespace(model="gpt-4o"))
    models(any_name=True).check(SimpleNamespace(model="llama:7b"))
    with pytest.raises(Refusal, match="unknown adapter 'mime'"):
        models(any_name=True).check(SimpleNamespace(model="org/base:mime"))


def test_responses_that_sglang_could_not_prepare_are_refused_and_other_routes_not() -> None:
    asked = Responses(model="m", input="hello")
    ResponsesThere(lambda: True).check(asked)
    absent = ResponsesThere(lambda: False)
    absent.check(TextCompletion(model="m", prompt="hello"))
    with pytest.raises(Refusal, match="/v1/chat/completions answers") as refused:
        absent.check(asked)
    assert refused.value.status == 501


def test_a_parser_that_sglang_has_not_is_refused_with_the_nearest_one() -> None:
    parsers = KnownParsers(tool_call=["qwen25", "kimi_k2"], reasoning=["qwen3"])
    parsers.check(FunctionCallText(text="t", tool_call_parser="qwen25"))
    parsers.check(ReasoningText(text="t", reasoning_parser="qwen3"))
    parsers.check(TextCompletion(model="m", prompt="hello"))
    with pytest.raises(Refusal, match="tool_call_parser 'qwen26' is unknown; did you mean 'qwen25'") as refused:
        parsers.check(FunctionCallText(text="t", tool_call_parser="qwen26"))
    assert refused.value.status == 400
    with pytest.raises(Refusal, match="reasoning_parser 'kimi_k2' is unknown; known: qwen3"):
        parsers.check(ReasoningText(text="t", reasoning_parser="kimi_k2"))
