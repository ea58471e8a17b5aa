"""The middleware together, around an app that has SGLang's CORS middleware and a route of its kind."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from pydantic import BaseModel

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.http.auth import ApiKey
from kt_runtime.serve.http.front_door import FrontDoor, check_reach
from kt_runtime.serve.options.named import ServeOptions

URL = "http://127.0.0.1:30000"
SITE = "http://localhost:3000"
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


class Chat(BaseModel):
    """Stricter than our table, so that its own errors are seen too."""

    messages: list[dict[str, str]]
    model: str = "default"


def ask(method: str, path: str, key: str | None = None, **options: Any) -> httpx.Response:
    request = {name: options.pop(name) for name in ("headers", "json") if name in options}
    app = FastAPI()
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_credentials=True)

    @app.post("/v1/chat/completions")
    async def chat(request: Chat) -> dict[str, str]:
        return {"model": request.model}

    door = FrontDoor(ServeOptions(model="m", **options), "base", ApiKey(key) if key else None, context_tokens=4096)
    door.prepare(app)
    door.serves(lambda: ["mine"])

    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
            return await client.request(method, path, **request)

    return asyncio.run(asked())


def cors(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control")}


def test_request_that_fits_is_answered_and_others_are_refused() -> None:
    assert ask("POST", "/v1/chat/completions", json=CHAT).json() == {"model": "default"}
    assert ask("POST", "/v1/chat/completions", json={**CHAT, "model": "mine"}).status_code == 200
    assert ask("POST", "/v1/chat/completions", json={**CHAT, "model": "mime"}).status_code == 404
    assert ask("POST", "/v1/chat/completions", json={**CHAT, "model": "gpt"}, any_model_name=True).status_code == 200
    assert ask("POST", "/v1/chat/completions", json={**CHAT, "sampling": 1}).status_code == 400
    assert ask("POST", "/no_such_route", json={}).status_code == 404


def test_sglangs_own_schema_errors_name_fields_and_no_files() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}
    answer = ask("POST", "/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "messages.0.content" in answer.json()["error"]["message"]
    assert ".py" not in answer.text


def test_no_origin_is_reflected_with_or_without_a_key() -> None:
    for key in (None, "correct-horse-battery"):
        headers = {"Origin": "http://evil.example", "Authorization": f"Bearer {key}"}
        answer = ask("POST", "/v1/chat/completions", key, json=CHAT, headers=headers)
        assert answer.status_code == (403 if key is None else 200) and not cors(answer)


def test_site_of_cors_origin_reads_answers_and_is_asked_before() -> None:
    question = {
        "Origin": SITE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    asked = ask("OPTIONS", "/v1/chat/completions", headers=question, cors_origins=(SITE,))
    assert asked.status_code == 200 and cors(asked)["access-control-allow-origin"] == SITE
    answer = ask("POST", "/v1/chat/completions", headers={"Origin": SITE}, json=CHAT, cors_origins=(SITE,))
    assert answer.status_code == 200 and cors(answer)["access-control-allow-origin"] == SITE
    refused = ask("POST", "/v1/chat/completions", headers={"Origin": SITE}, json={"x": 1}, cors_origins=(SITE,))
    assert refused.status_code == 400 and cors(refused)["access-control-allow-origin"] == SITE
    other = ask("OPTIONS", "/v1/chat/completions", headers={**question, "Origin": "http://a"}, cors_origins=(SITE,))
    assert other.status_code == 403


def test_largest_body_is_what_was_asked_for_or_follows_from_the_context() -> None:
    door = FrontDoor(ServeOptions(model="m"), "base", None, context_tokens=4096)
    assert door.max_body_bytes == 1024 * 1024 + 64 * 4096
    big = {"messages": [{"role": "user", "content": "x" * 3000}]}
    assert ask("POST", "/v1/chat/completions", json=big, max_body_bytes=2048).status_code == 413


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", ""])
def test_server_that_everyone_could_use_is_refused_unless_asked_for(host: str) -> None:
    with pytest.raises(InvalidValueError, match=r"--host .*KT_RUNTIME_API_KEY.*--allow-no-key"):
        check_reach(ServeOptions(model="m", host=host))
    check_reach(ServeOptions(model="m", host=host, allow_no_key=True))
    check_reach(ServeOptions(model="m", host=host, api_key="correct-horse-battery"))
    check_reach(ServeOptions(model="m", host="127.0.0.1"))
