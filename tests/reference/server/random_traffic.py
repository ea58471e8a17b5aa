"""Random requests to SGLang's scheduler in this process, and what training computes for the same tokens.

    traffic = Traffic(engine, adapters, seed)
    traffic.run(64)                       # batches of the native step
    with Trainer(engine, adapters) as trainer:
        logprobs = trainer.logprobs(traffic.rows)

Legend: V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from reference.resident.scheduler import Engine

from kt_runtime.adapters import AdapterTensors
from kt_runtime.families import family_for
from kt_runtime.resident.scheduler import run_at_once
from kt_runtime.resident.training.session import Session
from kt_runtime.resident.twin.batches import TrainingBatch
from kt_runtime.resident.twin.lora import LoraModules
from kt_runtime.resident.twin.model import Twin
from kt_runtime.sglang_patch.cpu import step as native_step
from kt_runtime.sglang_patch.store import expert_store
from kt_runtime.wire.messages import CrossEntropy, LoraSettings

FIRST_TOKEN, END_TOKEN = 3, 700
CHUNKS = (8, 16, 24, 40, 64)
LONGEST_PROMPT, LONGEST_ANSWER = 120, 10
MOST_REQUESTS = 8  # running or waiting


@dataclasses.dataclass(frozen=True)
class Row:
    """A request's prompt and answer. `adapter`: None, the base."""

    adapter: str | None
    tokens: list[int]


@dataclasses.dataclass(frozen=True)
class Seen:
    """A row of a batch: after `num_tokens` tokens of the request, log-probabilities of the next token, float32 [V]."""

    rid: str
    num_tokens: int
    logprobs: torch.Tensor


class Traffic:
    """Requests of random lengths for the base and for adapters, sent between the scheduler's turns.

    Prompts begin as earlier ones of their adapter, or as these with their answers, so that prefixes are cached. The
    limit of a chunk changes from turn to turn. SGLang mixes prefills and decodes in a batch only while no request asks
    for log-probabilities, so half of the time none does. `seen` has every row of every batch, whoever asked for it.

    `modes`: batches by mode. `cached_tokens`: with which requests began. `chunks`: of prompts, after the first ones.
    `most_models`: in one batch, the base and adapters.
    """

    def __init__(self, engine: Engine, adapters: Mapping[str, AdapterTensors], seed: int) -> None:
        self._engine, self._draw = engine, np.random.default_rng(seed)
        self._runner = engine.scheduler.tp_worker.model_runner
        self._adapters: list[str | None] = [None, *adapters]
        self._prompts: dict[str, tuple[str | None, list[int], int]] = {}
        self.seen: list[Seen] = []
        self.modes: Counter[str] = Counter()
        self.cached_tokens = self.chunks = self.most_models = 0
        self._begun: set[str] = set()
        torch.manual_seed(seed)  # of the sampler

    def run(self, num_batches: int) -> None:
        """Until the step has computed so many batches, some of each kind, and then until every request has ended."""
        runner, sample, run = self._runner, self._runner.sample, native_step.Program.run
        engine, chunk = self._engine, self._engine.scheduler.chunked_prefill_size

        def counted(program: Any, ids: Any, positions: Any, batch: Any) -> Any:
            self._count(batch)
            return run(program, ids, positions, batch)

        def recorded(output: Any, batch: Any) -> Any:
            logprobs = output.next_token_logits.float().log_softmax(-1)
            lengths = batch.seq_lens.tolist()
            self.seen += [Seen(*row) for row in zip(batch.rids, lengths, logprobs, strict=True)]
            return sample(output, batch)

        native_step.Program.run = counted  # type: ignore[method-assign,assignment]
        runner.sample = recorded
        try:
            while sum(self.modes.values()) < (num_batches if self._has_all_kinds() else 3 * num_batches):
                if len(self._prompts) - len(engine.ended) < MOST_REQUESTS and self._draw.random() < 0.5:
                    self._send(wants_logprobs=len(self._prompts) // 8 % 2 == 1)
                engine.scheduler.chunked_prefill_size = int(self._draw.choice(CHUNKS))
                engine.step()
            engine.run()
        finally:
            native_step.Program.run = run  # type: ignore[method-assign]
            del runner.sample
            engine.scheduler.chunked_prefill_size = chunk

    def _has_all_kinds(self) -> bool:
        return len(self.modes) == 3 and self.most_models > 2 and self.chunks > 0 and self.cached_tokens > 0

    def rows(self) -> dict[str, Row]:
        return {rid: Row(to, [*prompt, *self._engine.tokens[rid]]) for rid, (to, prompt, _) in self._prompts.items()}

    def served(self) -> Iterator[tuple[str, int, float]]:
        """(request, position of a token, its log-probability) of what SGLang answered."""
        for rid, (_, prompt, start) in self._prompts.items():
            for place, value in enumerate(self._engine.prompt_logprobs.get(rid, [])):
                yield rid, max(start, 0) + 1 + place, value
            for place, value in enumerate(self._engine.logprobs.get(rid, [])):
                yield rid, len(prompt) + place, value

    def _count(self, batch: Any) -> None:
        mode = batch.forward_mode.name
        if not batch.forward_mode.is_decode():
            prefixes = dict(zip(batch.rids, map(int, batch.extend_prefix_lens_cpu), strict=True))
            decoding = {rid for rid, prefix in prefixes.items() if prefix >= len(self._prompts[rid][1])}
            if decoding and len(decoding) < len(prefixes):
                mode = "MIXED"
            begun = prefixes.keys() & self._begun - decoding
            self.chunks += len(begun)
            self.cached_tokens += sum(prefix for rid, prefix in prefixes.items() if rid not in begun | decoding)
            self._begun |= prefixes.keys()
        self.modes[mode] += 1
        self.most_models = max(self.most_models, len(set(batch.lora_ids)))

    def _send(self, *, wants_logprobs: bool) -> None:
        draw = self._draw
        for _ in range(draw.integers(1, 4)):
            adapter = self._adapters[draw.integers(len(self._adapters))]
            prompt = [*self._beginning(adapter), *draw.integers(FIRST_TOKEN, END_TOKEN, draw.integers(1, 60)).tolist()]
            rid = f"{len(self._prompts)} {adapter or 'base'}"
            start = int(draw.integers(len(prompt))) if wants_logprobs and draw.random() < 0.4 else -1
            self._prompts[rid] = (adapter, prompt[-LONGEST_PROMPT:], start)
            values: dict[str, Any] = {"temperature": float(draw.integers(2)), "return_logprob": wants_logprobs}
            values |= {"lora_id": adapter, "max_new_tokens": int(draw.integers(1, LONGEST_ANSWER + 1))}
            self._engine.send(self._engine.request(rid, self._prompts[rid][1], logprob_start_len=start, **values))

    def _beginning(self, adapter: str | None) -> list[int]:
        """Of an earlier request to the adapter that has ended; often nothing."""
        ended = [rid for rid, (to, *_) in self._prompts.items() if to == adapter and rid in self._engine.ended]
        if not ended or self._draw.random() < 0.3:
            return []
        rid = ended[self._draw.integers(len(ended))]
        row = [*self._prompts[rid][1], *self._engine.tokens[rid]]
        return row[: self._draw.integers(1, LONGEST_PROMPT // 2 + 1)]


class Trainer:
    """The twin over the engine's weights, with a session for each adapter."""

    def __init__(self, engine: Engine, adapters: Mapping[str, AdapterTensors]) -> None:
        runner, family = engine.scheduler.tp_worker.model_runner, family_for(engine.config)
        tensors = {**dict(runner.model.named_buffers()), **dict(runner.model.named_parameters())}
        host = SimpleNamespace(
            config=engine.config, device=torch.device("cpu"), dtype=runner.dtype, experts=expert_store(),
            attends_in_float32=True, exchange=None, tensors=lambda: tensors,
        )  # fmt: skip
        self.twin = Twin(host)  # type: ignore[arg-type]
        lora, modules = LoraModules(self.twin), family.lora_modules(engine.config)
        self._sessions: dict[str, Session] = {}
        for name, adapter in adapters.items():
            own = [module for module in modules if module.name in adapter.modules]
            pairs = {module.name: adapter.modules[module.name] for module in own}
            values = {f"{of}.lora_{part}": getattr(pair, part.lower()) for of, pair in pairs.items() for part in "AB"}
            settings = LoraSettings(rank=adapter.rank, alpha=adapter.alpha, targets=["all"], seed=1)
            placed = lora.create(name, own, values, rank=adapter.rank, alpha=adapter.alpha, dropout=0.0)
            self._sessions[name] = Session(name, name, self.twin, lora, own, settings, run_at_once(placed))

    def logprobs(self, rows: Mapping[str, Row], max_tokens: int, **options: Any) -> dict[str, torch.Tensor]:
        """By row: float32 [tokens - 1], of every token but the first. `max_tokens`: of a microbatch.

        `activations` among `options`: by `forward_backward`, for the adapters' rows; else by `forward`.
        """
        found: dict[str, torch.Tensor] = {}
        for adapter in {row.adapter for row in rows.values()}:
            own = {rid: row.tokens for rid, row in rows.items() if row.adapter == adapter}
            batch = _batch(list(own.values()))
            session = next(iter(self._sessions.values())) if adapter is None else self._sessions[adapter]
            if adapter is None:
                call = session.forward(batch, CrossEntropy(), max_tokens, model="base")
            elif "activations" in options:
                call = session.forward_backward(batch, CrossEntropy(), max_tokens, **options)
            else:
                call = session.forward(batch, CrossEntropy(), max_tokens)
            found |= zip(own, run_at_once(call).logprobs.split(batch.lengths), strict=True)
        return found


def _batch(rows: list[list[int]]) -> TrainingBatch:
    tokens = np.concatenate([np.array(row[:-1], np.int32) for row in rows])
    targets = np.concatenate([np.array(row[1:], np.int32) for row in rows])
    return TrainingBatch([len(row) - 1 for row in rows], tokens, targets, np.ones(len(tokens), np.float32))
