"""The table against SGLang's real routes, and its bodies against the fields of SGLang's request models."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from reference.server.request_bodies import body_type_of

from kt_runtime.serve.http.route_table import RULES, Access, rule_for
from kt_runtime.serve.requests.bodies import free_json
from kt_runtime.serve.requests.bodies.bounds import BOUNDED_BY_BODY, Body


@pytest.mark.parametrize(
    ("method", "path", "access"),
    [
        ("GET", "/v1/models/org/name", Access.READ),
        ("GET", "/hicache/storage-backend", Access.READ),
        ("DELETE", "/hicache/storage-backend", Access.REFUSED),
        ("POST", "/dumper/configure", Access.REFUSED),
        ("DELETE", "/kt/adapters/a", Access.GUARDED),
        ("GET", "/kt/adapters/a", Access.READ),
        ("GET", "/flush_cache", Access.GUARDED),
        ("POST", "/start_profile", Access.REFUSED),
        ("POST", "/v1/responses", Access.GENERATE),
        ("GET", "/v1/responses/resp_1", Access.REFUSED),
    ],
)
def test_rule_is_chosen_by_path_and_method(method: str, path: str, access: Access) -> None:
    rule = rule_for(method, path)
    assert rule is not None and rule.access is access


@pytest.mark.parametrize("path", ["/health/x", "//generate", "/generate/", "/kt/adapters/a/b", "/healthx", "/kt"])
def test_path_that_only_resembles_a_rule_has_none(path: str) -> None:
    assert rule_for("POST", path) is None


def test_what_is_asked_has_a_body_and_what_is_refused_a_reason() -> None:
    for rule in RULES:
        assert (rule.body is not None) or rule.access is not Access.GENERATE, rule.path
        assert bool(rule.reason) is (rule.access is Access.REFUSED), rule.path


def all_routes(router: Any) -> list[tuple[str, str]]:
    """(method, path) of every route, also of included routers."""
    found = []
    for route in router.routes:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            prefix = getattr(route.include_context, "prefix", "")
            found += [(method, prefix + path) for method, path in all_routes(inner)]
        elif getattr(route, "methods", None):
            found += [(method, route.path) for method in route.methods]
        else:
            found.append(("WEBSOCKET", route.path))
    return found


def test_every_route_of_sglang_and_ours_is_classified() -> None:
    from fastapi import FastAPI
    from sglang.srt.entrypoints import http_server

    from kt_runtime.serve.http.routes import adapter_routes, cache_routes

    ours = FastAPI()
    ours.include_router(adapter_routes(None))  # type: ignore[arg-type]
    ours.include_router(cache_routes(None))  # type: ignore[arg-type]
    routes = all_routes(http_server.app.router) + all_routes(ours.router)
    assert ("POST", "/generate") in routes and ("POST", "/kt/adapters/{name}/rollback") in routes
    assert ("GET", "/v1/loads") in routes and ("POST", "/scale_elastic_ep") in routes
    unclassified = [route for route in routes if rule_for(*route) is None]
    assert not unclassified, f"say in serve/http/route_table.py who may call: {unclassified}"
    harmless = {rule_for(*route).access for route in routes if "weight" in route[1]}  # type: ignore[union-attr]
    assert harmless == {Access.REFUSED}


def test_route_whose_body_sglang_parses_has_a_body_here() -> None:
    """FastAPI knows which routes have one; ours read theirs themselves."""
    from sglang.srt.entrypoints import http_server

    found = 0
    for route in http_server.app.router.routes:
        if getattr(route, "body_field", None) is None:
            continue
        for method in route.methods:  # type: ignore[attr-defined]
            rule = rule_for(method, route.path)  # type: ignore[attr-defined]
            assert rule is not None
            assert rule.body is not None or rule.access is Access.REFUSED, f"{method} {route.path}"  # type: ignore[attr-defined]
            found += 1
    assert found > 40


def models() -> list[tuple[str, type]]:
    """SGLang's class of each body, by path."""
    from sglang.srt.entrypoints.anthropic import protocol as anthropic
    from sglang.srt.entrypoints.openai import protocol as openai
    from sglang.srt.managers import io_struct

    return [
        ("/generate", io_struct.GenerateReqInput),
        ("/vertex_generate", io_struct.VertexGenerateReqInput),
        ("/v1/completions", openai.CompletionRequest),
        ("/v1/chat/completions", openai.ChatCompletionRequest),
        ("/v1/responses", openai.ResponsesRequest),
        ("/v1/messages", anthropic.AnthropicMessagesRequest),
        ("/v1/messages/count_tokens", anthropic.AnthropicCountTokensRequest),
        ("/v1/tokenize", openai.TokenizeRequest),
        ("/v1/detokenize", openai.DetokenizeRequest),
        ("/v1/score", openai.ScoringRequest),
        ("/v1/decisions", openai.DecisionRequest),
    ]


def names_of(model: type) -> set[str]:
    if dataclasses.is_dataclass(model):
        return {field.name for field in dataclasses.fields(model)}
    if issubclass(model, msgspec.Struct):
        return {field.encode_name for field in msgspec.structs.fields(model)}
    return set(model.model_fields)  # type: ignore[attr-defined]


def test_every_field_of_sglangs_requests_is_allowed_or_left_out_with_a_reason() -> None:
    for path, model in models():
        body = body_type_of(path)
        allowed, left_out = names_of(body), body.left_out
        named = names_of(model) - {"http_worker_ipc", "rid"} if path == "/vertex_generate" else names_of(model)
        unknown = named - allowed - left_out.keys()
        assert not unknown, f"{path}: say in {body.__module__} whether it may have {sorted(unknown)}"
        assert not allowed & left_out.keys(), f"{path}: both allowed and left out"


def test_every_field_of_sampling_params_is_allowed_or_left_out() -> None:
    from sglang.srt.sampling.sampling_params import SamplingParams as Theirs

    from kt_runtime.serve.requests.bodies.sampling import SamplingParams

    assert names_of(Theirs) == names_of(SamplingParams) | SamplingParams.left_out.keys()


BODIES: set[type[Body]] = {rule.body for rule in RULES if rule.body}


@pytest.mark.parametrize("body", sorted(BODIES, key=repr))
def test_every_field_has_a_bound(body: type[Body]) -> None:
    unbounded = list(without_bound(msgspec.inspect.type_info(body), body.__name__, set()))
    assert not unbounded


def without_bound(kind: Any, where: str, seen: set[type]) -> Any:
    """Every number has both ends, every text, list and object a length, or the body's limit holds for it."""
    inspect = msgspec.inspect
    if isinstance(kind, inspect.Metadata):
        is_prompt = kind.extra == BOUNDED_BY_BODY
        yield from inner(kind.type, where, seen) if is_prompt else without_bound(kind.type, where, seen)
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from without_bound(one, where, seen)
    elif isinstance(kind, inspect.StructType):
        if kind.cls not in seen:
            seen.add(kind.cls)
            assert kind.forbid_unknown_fields, f"{where}: {kind.cls.__name__} takes any field"
            for field in kind.fields:
                yield from without_bound(field.type, f"{where}.{field.encode_name}", seen)
    elif isinstance(kind, inspect.IntType | inspect.FloatType):
        if (kind.ge is None and kind.gt is None) or (kind.le is None and kind.lt is None):
            yield where
    elif isinstance(kind, inspect.StrType):
        if kind.max_length is None:
            yield where
    elif isinstance(kind, inspect.ListType | inspect.DictType):
        if kind.max_length is None:
            yield where
        yield from inner(kind, where, seen)
    elif isinstance(kind, inspect.CustomType):
        assert issubclass(kind.cls, free_json.Checked), where
    else:
        assert isinstance(kind, inspect.BoolType | inspect.NoneType | inspect.LiteralType), (where, kind)


def inner(kind: Any, where: str, seen: set[type]) -> Any:
    if isinstance(kind, msgspec.inspect.ListType):
        yield from without_bound(kind.item_type, f"{where}[]", seen)
    elif isinstance(kind, msgspec.inspect.DictType):
        yield from without_bound(kind.key_type, f"{where}.key", seen)
        yield from without_bound(kind.value_type, f"{where}[]", seen)
