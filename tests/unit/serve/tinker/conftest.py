"""The Tinker API with its real routes, over a resident, an engine and an adapter store in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import orjson
import pytest
from fastapi import FastAPI

from kt_runtime.errors import InvalidValueError, KtError
from kt_runtime.families import family_for
from kt_runtime.serve.http.route_table import rule_for
from kt_runtime.serve.requests.checks.middleware import RequestMiddleware
from kt_runtime.serve.tinker.model import ModelFacts
from kt_runtime.serve.tinker.routes import tinker_routes
from kt_runtime.serve.tinker.service import TinkerService
from kt_runtime.wire import messages as m
from kt_runtime.wire import replies
from kt_runtime.wire.codec import Arrays
from kt_runtime.wire.messages import AnyRequest
from kt_runtime.wire.status import SessionInfo

_R = TypeVar("_R", bound=replies.Reply)

CONTEXT_TOKENS = 64
CONFIG = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 64,
    "vocab_size": 100,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@dataclass
class MemoryResident:
    """Answers training requests and records them. `errors`: by message type, raised once. `gate`: closed, it holds
    every request up."""

    address: str = "memory"
    requests: list[Any] = field(default_factory=list)
    errors: dict[type, KtError] = field(default_factory=dict)
    gate: asyncio.Event | None = None
    published: int = 0

    def received(self, kind: type) -> list[Any]:
        return [request for request in self.requests if isinstance(request, kind)]

    async def call(self, request: AnyRequest, reply_type: type[_R], timeout_s: float) -> _R:
        return (await self.exchange(request, reply_type, timeout_s))[0]

    async def exchange(
        self, request: AnyRequest, reply_type: type[_R], timeout_s: float, arrays: Arrays | None = None
    ) -> tuple[_R, dict[str, np.ndarray]]:
        self.requests.append(request)
        if self.gate is not None and not isinstance(request, m.CloseSession):
            await self.gate.wait()
        if type(request) in self.errors:
            raise self.errors.pop(type(request))
        reply, received = self._reply(request, arrays)
        assert isinstance(reply, reply_type)
        return reply, received

    def _reply(self, request: Any, arrays: Any) -> Any:
        match request:
            case m.Forward() | m.ForwardBackward():
                logprobs = -np.arange(len(arrays["tokens"]), dtype=np.float32)
                metrics = {"kl/k1": 1.0, "kl/k3": 2.0, "clipped": 1.0, "tokens": 4.0}
                reply = replies.ForwardReply(
                    request_id=request.request_id, loss=3.5, num_tokens=len(logprobs), seconds=0.1, metrics=metrics
                )
                return reply, {"logprobs": logprobs}
            case m.CreateSession() | m.Load():
                info = SessionInfo(
                    session=request.session, rank=1, alpha=1.0, step=0, modules=["o_proj"], num_parameters=1
                )
                return replies.SessionReply(request_id=request.request_id, info=info), {}
            case m.OptimStep():
                return replies.OptimReply(request_id=request.request_id, step=1, grad_norm=0.5, finished_at=0.0), {}
            case m.Save():
                Path(request.path).mkdir(parents=True, exist_ok=True)
                Path(request.path, "adapter_config.json").write_text("{}")
                return replies.SavedReply(
                    request_id=request.request_id, path=request.path, content_hash="h", step=1
                ), {}
            case m.Publish():
                self.published += 1
                version = f"{self.published:064x}"
                return _published(request, version), {}
        return replies.DoneReply(request_id=request.request_id), {}


def _published(request: m.Publish, version: str) -> replies.PublishReply:
    return replies.PublishReply(
        request_id=request.request_id, name=request.name, version=version, lora_id=version, publish_ms=1.0
    )


@dataclass
class MemoryEngine:
    """Continues every prompt with 7, 8, 9, ... at log-probability -0.5. `names`: of served adapters."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    pinned: dict[str, str] = field(default_factory=dict)
    gate: asyncio.Event | None = None
    aborted: list[str] = field(default_factory=list)

    def pin(self, alias: str, name: str) -> str:
        if name in self.pinned:
            self.pinned[alias] = self.pinned[name]
        elif name in self.names:
            self.pinned[alias] = self.names[name]
        else:
            raise InvalidValueError(f"unknown adapter {name!r}")
        return self.pinned[alias]

    def unpin(self, alias: str) -> None:
        self.pinned.pop(alias, None)

    async def generate(self, fields: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(fields)
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.aborted.append(fields["rid"])
                raise
        prompt, new = fields["input_ids"], fields["sampling_params"]["max_new_tokens"]
        tokens = list(range(7, 7 + new))
        k, start = fields["top_logprobs_num"], fields["logprob_start_len"]
        meta: dict[str, Any] = {
            "finish_reason": {"type": "length"},
            "cached_tokens": 2,
            "output_token_logprobs": [(-0.5, token, None) for token in tokens],
            "output_top_logprobs": [[(-0.5, token, None)] * k for token in tokens],
        }
        if start >= 0:
            scored = prompt[start:]
            meta["input_token_logprobs"] = [
                (None if index == 0 else -float(index), token, None) for index, token in enumerate(scored)
            ]
            meta["input_top_logprobs"] = [None] + [[(-1.0, token, None)] * k for token in scored[1:]]
        return {"output_ids": tokens, "meta_info": meta}


@dataclass
class MemoryAdapters:
    served: dict[str, str] = field(default_factory=dict)
    unloaded: list[str] = field(default_factory=list)
    loaded: list[tuple[str, str]] = field(default_factory=list)

    async def list_all(self) -> list[dict[str, Any]]:
        return [
            {"name": name, "current": version, "versions": [{"version": version, "lora_id": version}]}
            for name, version in self.served.items()
        ]

    async def load(self, name: str, path: str, *, take_over: bool = False) -> dict[str, Any]:
        self.served[name] = "loaded"
        self.loaded.append((name, path))
        return {"name": name, "version": "loaded"}

    async def unload(self, name: str) -> dict[str, Any]:
        self.unloaded.append(name)
        self.served.pop(name, None)
        return {}


class Desk:
    """One server. `post` and `get` talk to its routes; `result` fetches a future."""

    def __init__(self, place: Path) -> None:
        self.resident, self.engine, self.adapters = MemoryResident(), MemoryEngine(), MemoryAdapters()
        self.place = place

    def run(self, scenario: Callable[[Desk], Awaitable[None]], *, now: Callable[[], float] = time.monotonic) -> None:
        """Clients that are silent for 60 s of `now` are lost."""

        async def main() -> None:
            model = ModelFacts("tiny", ["tiny"], Path("/models/tiny"), family_for(CONFIG), CONFIG, CONTEXT_TOKENS)
            self.service = TinkerService(
                self.resident,
                self.engine,
                self.adapters,
                model,
                self.place,
                reserved={"tiny"},
                lost_after_s=60.0,
                now=now,
            )
            app = FastAPI()
            app.include_router(tinker_routes(self.service))
            transport = httpx.ASGITransport(app=RequestMiddleware(app, rule_for, 1 << 20, []))  # type: ignore[arg-type]
            watching = asyncio.create_task(self.service.watch())
            async with httpx.AsyncClient(transport=transport, base_url="http://here/api/v1/") as self.http:
                try:
                    async with asyncio.timeout(300):
                        await scenario(self)
                finally:
                    watching.cancel()
                    await asyncio.gather(watching, return_exceptions=True)
                    await self.service.close()

        asyncio.run(main())

    async def post(self, path: str, body: Any, status: int = 200, **headers: str) -> Any:
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        answer = await self.http.post(
            path, content=content, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        assert answer.status_code == status, answer.text
        assert answer.content
        return answer.json()

    async def get(self, path: str, status: int = 200) -> Any:
        answer = await self.http.get(path)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def result(self, opened: Any) -> Any:
        return await self.post("retrieve_future", {"request_id": opened["request_id"]})

    async def session(self) -> str:
        session: str = (await self.post("create_session", {"tags": [], "sdk_version": "0.38.0"}))["session_id"]
        return session

    async def model(self, session: str, number: int = 0, **lora: Any) -> str:
        body = {
            "session_id": session,
            "model_seq_id": number,
            "base_model": "tiny",
            "lora_config": {"rank": 4, "train_unembed": True, **lora},
        }
        result = await self.result(await self.post("create_model", body))
        assert result == {"type": "create_model", "model_id": f"{session}:train:{number}"}
        return str(result["model_id"])

    @staticmethod
    def training(model: str, seq_id: int, loss: str = "cross_entropy", **inputs: Any) -> dict[str, Any]:
        """A JSON body as SDK 0.7 sends it: one datum of three tokens."""
        given = {"target_tokens": ("int64", [2, 3, 4]), "weights": ("float32", [0.0, 1.0, -2.0]), **inputs}
        datum = {
            "model_input": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
            "loss_fn_inputs": {
                name: {"data": data, "dtype": dtype, "shape": [len(data)]} for name, (dtype, data) in given.items()
            },
        }
        return {
            "forward_backward_input": {"data": [datum], "loss_fn": loss, "loss_fn_config": None},
            "model_id": model,
            "seq_id": seq_id,
        }


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)
