"""A resident that counts instead of computing: its losses depend on every call and step before, as a model's do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from kt_runtime.files import TEMPORARY_PREFIX, write_directory
from kt_runtime.train.resident import Resident
from kt_runtime.wire import Batch, ForwardResult, LoraSettings, Loss, PolicyLoss, Samples, Ticket
from kt_runtime.wire.messages import Activations, GetStatus, Model, RoutingReplay
from kt_runtime.wire.replies import OptimReply, PublishReply, SavedReply
from kt_runtime.wire.status import KeptRoutes, SessionInfo

KEPT_ROUTES = KeptRoutes(size_bytes=1, capacity_tokens=1, tokens=0, dropped_tokens=0, found_tokens=0, missed_tokens=0)
TENSORS = "adapter_model.safetensors"
ADAPTED = "base_model.model.model.layers.0.self_attn.o_proj"


@dataclass
class CountingResident:
    """`log`: what was asked of it, in order. `on_step`: called after every step."""

    model_directory: Path
    sessions: dict[str, dict[str, float]] = field(default_factory=dict)
    log: list[tuple[Any, ...]] = field(default_factory=list)
    on_step: Callable[[int], None] = lambda step: None
    eval_losses: list[float] = field(default_factory=list)
    context_tokens: int = 512
    claimed: tuple[str | None, bool] = (None, False)
    refuses_to_publish: Exception | None = None
    samples: list[Samples] = field(default_factory=list)
    k3: float = 0.0
    replays: list[tuple[RoutingReplay, str | None]] = field(default_factory=list)
    keeps_routes: bool = False
    _under_way: dict[Ticket, ForwardResult] = field(default_factory=dict)

    def status(self) -> Any:
        sessions = [SimpleNamespace(session=name) for name in self.sessions]
        return SimpleNamespace(
            sessions=sessions,
            fingerprint="base",
            model_directory=str(self.model_directory),
            context_tokens=self.context_tokens,
            exact=True,
            max_lora_rank=64,
            kept_routes=KEPT_ROUTES if self.keeps_routes else None,
        )

    def create_session(
        self,
        session: str,
        lora: LoraSettings,
        start_from: str | None = None,
        *,
        reference: str | None = None,
        publishes: str | None = None,
        take_over: bool = False,
    ) -> SessionInfo:
        assert session not in self.sessions
        self.sessions[session] = {"value": 1.0, "step": 0, "calls": 0, "gradient": 0.0}
        self.log.append(("create", lora, start_from, reference))
        self.claimed = (publishes, take_over)
        modules = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]
        return SessionInfo(session=session, rank=lora.rank, alpha=lora.alpha, step=0, modules=modules, num_parameters=9)

    def begin_forward_backward(
        self,
        session: str,
        batch: Batch,
        loss: Loss | None = None,
        *,
        reference: Any = None,
        samples: Samples | None = None,
        activations: Activations = "recompute",
        routing_replay: RoutingReplay = "off",
        rollout_version: str | None = None,
    ) -> Ticket:
        self.replays.append((routing_replay, rollout_version))
        state = self.sessions[session]
        state["calls"] += 1
        result = self._result(state, batch, loss, reference, state["calls"])
        if routing_replay != "off":
            replayed = 0.75 * batch.num_tokens if routing_replay == "rollout" else 0.0
            missed, moved = 0.25 * batch.num_tokens, 0.5 * batch.num_tokens
            result.metrics.update({"routes/replayed": replayed, "routes/missed": missed, "routes/moved": moved})
        state["gradient"] += result.loss
        self.log.append(("forward_backward", batch, loss, reference, activations))
        self.samples += [] if samples is None else [samples]
        return self._ticket(result)

    def begin_forward(
        self, session: str, batch: Batch, loss: Loss | None = None, *, model: Model = "policy", reference: Any = None
    ) -> Ticket:
        self.log.append(("forward", batch, loss, model, reference))
        result = self._result(self.sessions[session], batch, loss, reference, 0)
        if model == "policy" and self.eval_losses:
            scaled = self.eval_losses.pop(0) * float(np.count_nonzero(batch.weights))
            result = replace(result, loss=scaled, seconds=0.0)
        return self._ticket(result)

    def finish_forward(self, ticket: Ticket, batch: Batch) -> ForwardResult:
        return self._under_way.pop(ticket)

    def optim_step(self, session: str, learning_rate: float, **settings: Any) -> OptimReply:
        state = self.sessions[session]
        state["value"] -= learning_rate * state["gradient"]
        state["step"] += 1
        norm, state["gradient"] = abs(state["gradient"]), 0.0
        self.log.append(("optim_step", learning_rate, settings))
        self.on_step(int(state["step"]))
        return OptimReply(request_id="", step=int(state["step"]), grad_norm=norm, finished_at=0.0)

    def save(self, session: str, path: str, *, optimizer: bool = True, replace: bool = False) -> SavedReply:
        state = dict(self.sessions[session])

        def fill(directory: Path) -> None:
            save_file({f"{ADAPTED}.lora_A.weight": torch.tensor([[state["value"]]])}, directory / TENSORS)
            (directory / "adapter_config.json").write_text("{}")
            (directory / "session.json").write_text(json.dumps(state))
            if optimizer:
                (directory / "optimizer.safetensors").write_bytes(b"")

        write_directory(Path(path), fill, replace=(lambda old, shown: None) if replace else None)
        self.log.append(("save", Path(path).name.removeprefix(TEMPORARY_PREFIX)))
        return SavedReply(request_id="", path=path, content_hash="", step=int(state["step"]))

    def load(self, session: str, path: str) -> SessionInfo:
        state = self.sessions[session] = json.loads((Path(path) / "session.json").read_text())
        self.log.append(("load", Path(path).name))
        step = int(state["step"])
        return SessionInfo(session=session, rank=1, alpha=1.0, step=step, modules=[], num_parameters=1)

    def publish(self, session: str, name: str, *, take_over: bool = False) -> PublishReply:
        if self.refuses_to_publish is not None:
            raise self.refuses_to_publish
        self.log.append(("publish", name, int(self.sessions[session]["step"])))
        return PublishReply(request_id="", name=name, version="v" * 64, lora_id="l", publish_ms=1.0)

    def close_session(self, session: str) -> None:
        del self.sessions[session]

    def count(self, what: str) -> int:
        return sum(entry[0] == what for entry in self.log)

    def _ticket(self, result: ForwardResult) -> Ticket:
        ticket = Ticket(GetStatus(request_id=""), [], 0.0, 0.0)
        self._under_way[ticket] = result
        return ticket

    def _result(
        self, session: dict[str, float], batch: Batch, loss: Any, reference: Any, calls: float
    ) -> ForwardResult:
        logprobs = -(batch.targets % 7 + 1).astype(np.float32) * np.float32(0.1)
        value = session["value"] * float(np.dot(batch.weights.astype(np.float64), -logprobs)) + 1e-3 * calls
        metrics = {}
        if isinstance(loss, PolicyLoss):
            counted = float(np.count_nonzero(batch.weights))
            metrics = {"kl/k1": 0.0, "kl/k3": self.k3, "clipped": 0.0, "tokens": counted}
        elif loss is not None:
            assert (reference is None) == (not loss.has_reference) or calls == 0
            value *= loss.scale
            num_pairs = len(batch.lengths) / 2
            metrics = {"rewards/accuracies": 0.5 * num_pairs, "rewards/margins": num_pairs}
        return ForwardResult(value, batch.split(logprobs), batch.num_tokens, 0.0, metrics, 1, batch.num_tokens)


IMPLEMENTS: type[Resident] = CountingResident  # a type checker compares them


@dataclass
class Lines:
    """A display for tests."""

    lines: list[str] = field(default_factory=list)
    positions: list[tuple[int, int]] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.lines.append(line)

    def progress(self, done: int, total: int, facts: Any) -> None:
        self.positions.append((done, total))

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __contains__(self, text: str) -> bool:
        return any(text in line for line in self.lines)
