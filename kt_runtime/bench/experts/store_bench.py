"""Measures the rows of one loaded store: one format, instruction set and number of threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kt_runtime.bench.experts.layer_case import Batch, LayerCase, relative_error
from kt_runtime.bench.experts.limits import Work, forward_work, training_work
from kt_runtime.bench.experts.measurement import Instruments, Patience, Row, Timing, measure
from kt_runtime.bench.experts.plan import FORWARD, TRAINING, BenchFormat
from kt_runtime.experts import ExpertGradients, ExpertStore, LoraSlot
from kt_runtime.experts.machine import MemoryReader, take_engine_seconds, workers_awake

RETAIN, RECOMPUTE = "retain", "recompute"


@dataclass(frozen=True)
class Training:
    """Forward and backward of one batch with LoRA; adds the gradients of the LoRA tensors to `into`."""

    store: ExpertStore
    lora: LoraSlot
    into: LoraSlot

    def forward(self, batch: Batch) -> Tensor:
        return self.store.layers[0].forward(batch.x, batch.ids, batch.weights, **self._slots(batch))

    def step(self, batch: Batch, activations: str, into: LoraSlot | None = None) -> ExpertGradients:
        layer, inputs, slots = self.store.layers[0], (batch.x, batch.ids, batch.weights), self._slots(batch)
        retained = None
        if activations == RETAIN:
            _, retained = layer.forward_retaining(*inputs, **slots)
        else:
            layer.forward(*inputs, **slots)
        return layer.backward(batch.grad_out, *inputs, **slots, into=[into or self.into], retained=retained)

    def _slots(self, batch: Batch) -> dict[str, Any]:
        return {"slots": [self.lora], "token_slots": torch.zeros(batch.num_tokens, dtype=torch.int32)}


class StoreBench:
    """`reader`: its passes go between the calls, and leave no weights in a cache."""

    def __init__(
        self, case: LayerCase, form: BenchFormat, store: ExpertStore, patience: Patience, reader: MemoryReader
    ) -> None:
        self._case, self._form, self._store, self._patience, self._reader = case, form, store, patience, reader
        self._forwards: dict[int, Timing] = {}

    def rows(self, tokens: int, op: str) -> list[Row]:
        return [self.forward_row(tokens)] if op == FORWARD else self.training_rows(tokens)

    def forward_row(self, tokens: int) -> Row:
        few, expected = self._case.few(tokens), self._case.expected(tokens)
        got = self._forward(self._case.batches(tokens)[0])[: few.num_tokens]
        row = self._row(tokens, FORWARD, self._forward_timing(tokens), self._forward_work(tokens))
        row.rel_error = relative_error(got, expected)
        if self._form.path == "int8":
            exact = self._store.layers[0].forward(few.x.float(), few.ids, few.weights)
            row.activation_error = float((got.double() - exact.double()).norm() / expected.norm())
            row.weight_error = relative_error(exact, expected)
        return row

    def training_rows(self, tokens: int) -> list[Row]:
        training = Training(self._store, self._case.lora, self._case.lora.zeros())
        with_lora = self._measure(training.forward, tokens).ms
        rows = []
        for activations in (RETAIN, RECOMPUTE):
            work = self._training_work(tokens, activations)

            def step(batch: Batch, activations: str = activations) -> ExpertGradients:
                return training.step(batch, activations)

            row = self._row(tokens, TRAINING, self._measure(step, tokens), work)
            row.activations = activations
            row.ratio_to_forward = row.timing.ms / self._forward_timing(tokens).ms
            row.ratio_to_lora_forward = row.timing.ms / with_lora
            row.gradient_errors = self._gradient_errors(training, tokens, activations)
            row.rel_error = max(row.gradient_errors.values())
            rows.append(row)
        return rows

    def _gradient_errors(self, training: Training, tokens: int, activations: str) -> dict[str, float]:
        """Relative errors: for x and routing weights from the whole batch; for LoRA, whose gradients are sums over
        tokens, from a step with only the reference's few tokens."""
        expected, few = self._case.expected_gradients(tokens), self._case.few(tokens)
        whole = training.step(self._case.batches(tokens)[0], activations)
        slot = self._case.lora.zeros()
        training.step(few, activations, into=slot)
        lora = torch.cat([t.double().flatten() for t in slot.tensors() if t is not None])
        return {
            "x": relative_error(whole.x[: few.num_tokens], expected.x),
            "weights": relative_error(whole.weights[: few.num_tokens], expected.weights),
            "lora": relative_error(lora, torch.cat([t.flatten() for t in expected.lora])),
        }

    def _forward(self, batch: Batch) -> Tensor:
        return self._store.layers[0].forward(batch.x, batch.ids, batch.weights)

    def _forward_timing(self, tokens: int) -> Timing:
        if tokens not in self._forwards:
            self._forwards[tokens] = self._measure(self._forward, tokens)
        return self._forwards[tokens]

    def _measure(self, call: Callable[[Batch], object], tokens: int) -> Timing:
        def bound(batch: Batch) -> Callable[[], object]:
            return lambda: call(batch)

        calls = [bound(batch) for batch in self._case.batches(tokens)]
        read = partial(self._reader.rate, self._store.isa, self._store.num_threads)
        warms_code = 2 * tokens * self._case.shape.top_k <= self._case.shape.num_experts
        with workers_awake():
            return measure(calls, self._patience, Instruments(read, take_engine_seconds, warms_code))

    def _forward_work(self, tokens: int) -> Work:
        return forward_work(*self._counts(tokens), self._form.path)

    def _training_work(self, tokens: int, activations: str) -> Work:
        return training_work(*self._counts(tokens), self._form.path, recomputed=activations == RECOMPUTE)

    def _counts(self, tokens: int) -> tuple[float, float]:
        """(bytes of the experts that forward touches, operations of forward), two operations for a multiply-add."""
        shape, touched = self._case.shape, self._case.batches(tokens)[0].touched_experts
        bytes_per_expert = self._store.resident_bytes / shape.num_experts
        return touched * bytes_per_expert, 2.0 * tokens * shape.top_k * shape.weights_per_expert

    def _reuse_bytes(self, tokens: int) -> int:
        """Bytes read until all experts have been used once (`make_batches`): all experts, and a pass of the reader
        after each call."""
        shape = self._case.shape
        calls = max(1, shape.num_experts // (tokens * shape.top_k))
        passes = max(1, calls // 2)  # where one call fits twice, every other call is untimed, without a pass
        return self._store.resident_bytes + passes * self._reader.bytes_at_once

    def _row(self, tokens: int, op: str, timing: Timing, work: Work) -> Row:
        shape, store = self._case.shape, self._store
        return Row(
            shape=shape.name,
            experts=shape.num_experts,
            format=self._form.name,
            weight_format=store.format,
            isa=store.isa,
            threads=store.num_threads,
            tokens=tokens,
            op=op,
            timing=timing,
            work=work,
            touched_experts=self._case.batches(tokens)[0].touched_experts,
            rel_error=0.0,
            reuse_bytes=self._reuse_bytes(tokens),
            resident_bytes=store.resident_bytes,
            weight_bytes=store.weight_bytes,
        )
