"""Adds the peers' times and errors for the same cases to the rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kt_runtime.bench.experts import torch_peers
from kt_runtime.bench.experts.inputs import Batch
from kt_runtime.bench.experts.kt_kernel import KtKernel
from kt_runtime.bench.experts.layer_case import LayerCase
from kt_runtime.bench.experts.plan import FORWARD, TRAINING
from kt_runtime.bench.experts.reference import relative_error
from kt_runtime.bench.experts.rows import Row
from kt_runtime.bench.experts.timing import Patience, measure

KT_KERNEL = "kt_kernel"
# PyTorch's errors for an operator that is missing for this processor, shape or version.
TORCH_ERRORS = (RuntimeError, NotImplementedError, AttributeError, ValueError, TypeError)


class TorchPeers:
    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self.problems: dict[str, str] = {}

    def facts(self) -> dict[str, Any]:
        return {"version": str(torch.__version__), "problems": self.problems}

    def add(self, case: LayerCase, rows: list[Row]) -> None:
        """`rows`: of one shape and format."""
        threads_before = torch.get_num_threads()
        try:
            for op in (FORWARD, TRAINING):
                wanted = {(row.threads, row.tokens): None for row in rows if row.op == op}
                made = self._made(case, rows[0].format, op) if wanted else {}
                for threads, tokens in wanted:
                    torch.set_num_threads(threads)
                    its = [row for row in rows if (row.op, row.threads, row.tokens) == (op, threads, tokens)]
                    for name, call in made.items():
                        self._fill(case, name, call, its)
        finally:
            torch.set_num_threads(threads_before)

    def _made(self, case: LayerCase, format_name: str, op: str) -> dict[str, Callable[[Batch], Tensor | None]]:
        try:
            if op == FORWARD:
                return dict(torch_peers.forward_peers(case.weights, format_name))
            return dict(torch_peers.training_peers(case.weights, format_name, case.lora))
        except TORCH_ERRORS as error:
            self._note(f"{case.shape.name} {format_name}", error)
            return {}

    def _fill(self, case: LayerCase, name: str, call: Callable[[Batch], Tensor | None], rows: list[Row]) -> None:
        tokens = rows[0].tokens

        def bound(batch: Batch) -> Callable[[], object]:
            return lambda: call(batch)

        try:
            timing = measure([bound(batch) for batch in case.batches(tokens)], self._patience)
            output = call(case.few(tokens))
        except TORCH_ERRORS as error:
            self._note(f"{name}, {case.shape.name}, {tokens} tokens", error)
            return
        for row in rows:
            row.peers[name] = timing.ms
            if output is not None:
                row.peer_errors[name] = relative_error(output, case.expected(tokens))

    def _note(self, where: str, error: Exception) -> None:
        self.problems[where] = f"{type(error).__name__}: {error}".splitlines()[0][:300]


class KtKernelPeer:
    def __init__(self, python: Path, patience: Patience) -> None:
        self._kt_kernel = KtKernel(python)
        self._patience = patience
        self.problems: dict[str, str] = {}

    def facts(self) -> dict[str, Any]:
        return self._kt_kernel.facts() | {"problems": self.problems}

    def encoding(self, format_name: str) -> str | None:
        return self._kt_kernel.encoding(format_name)

    def add(self, case: LayerCase, rows: list[Row], directory: Path) -> None:
        """`rows`: of one shape and format. `directory`: of a checkpoint in that format's `encoding`."""
        for threads in {row.threads: None for row in rows}:
            its = [row for row in rows if row.threads == threads]
            cases = {(row.tokens, row.op): case.batches(row.tokens) for row in its}
            args = (directory, case.shape, its[0].format, threads, cases, case.lora, self._patience)
            answer = self._kt_kernel.measure(*args)
            self.problems |= {f"{case.shape.name}: {what}": problem for what, problem in answer.problems.items()}
            for row in its:
                by_class = answer.ms.get((row.tokens, row.op), {})
                if not by_class:
                    continue
                fastest = min(by_class, key=lambda name: by_class[name])
                row.peers[KT_KERNEL], row.kt_kernel_classes = by_class[fastest], dict(by_class)
                output = answer.outputs.get((row.tokens, fastest))
                if row.op == FORWARD and output is not None:
                    row.peer_errors[KT_KERNEL] = relative_error(output, case.expected(row.tokens))
