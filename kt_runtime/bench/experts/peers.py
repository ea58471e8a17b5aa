"""PyTorch and kt-kernel as peers: adds their times and errors for the same cases to the rows.

PyTorch's implementations of the same layer in the same format, the best known one of each kind:
bf16: `torch_loop`, a loop over the experts; `torch_grouped`, a grouped matmul; `torch_autograd`, the loop with LoRA
under autograd. int8: `torch_int8pack` (weights only) and `torch_int_mm` (activations quantized per token too).
int4: `torch_int4pack`, groups of 32 and 128 columns. For the CPU, PyTorch has no product with fp8 weights in blocks of
128 x 128, and none with zero points as a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kt_runtime.bench.experts.checkpoint import to_integers
from kt_runtime.bench.experts.kt_kernel import KtKernel
from kt_runtime.bench.experts.layer_case import Batch, LayerCase, Weights, relative_error
from kt_runtime.bench.experts.measurement import Instruments, Patience, Row, measure
from kt_runtime.bench.experts.plan import FORWARD, TRAINING
from kt_runtime.experts import LoraSlot
from kt_runtime.experts.machine import MemoryReader

KT_KERNEL = "kt_kernel"
# PyTorch's errors for an operator that is missing for this processor, shape or version.
TORCH_ERRORS = (RuntimeError, NotImplementedError, AttributeError, ValueError, TypeError)

Forward = Callable[[Batch], Tensor]
# (expert, "gate_up" or "down", rows [m, in] bfloat16) -> [m, out] bfloat16
Product = Callable[[int, str, Tensor], Tensor]

INT4_GROUPS = {"int4": 32, "int4_g32": 32, "int4_g128": 128}


class TorchPeers:
    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self.problems: dict[str, str] = {}

    def facts(self) -> dict[str, Any]:
        return {"version": str(torch.__version__), "problems": self.problems}

    def add(self, case: LayerCase, rows: list[Row], reader: MemoryReader) -> None:
        """`rows`: of one shape and format. Passes of `reader` between calls leave the peer's weights in no cache."""
        threads_before = torch.get_num_threads()
        try:
            for op in (FORWARD, TRAINING):
                wanted = {(row.threads, row.tokens): None for row in rows if row.op == op}
                made = self._made(case, rows[0].format, op) if wanted else {}
                for threads, tokens in wanted:
                    torch.set_num_threads(threads)
                    its = [row for row in rows if (row.op, row.threads, row.tokens) == (op, threads, tokens)]
                    for name, call in made.items():
                        self._fill(case, name, call, its, reader)
        finally:
            torch.set_num_threads(threads_before)

    def _made(self, case: LayerCase, format_name: str, op: str) -> dict[str, Callable[[Batch], Tensor | None]]:
        try:
            if op == FORWARD:
                return dict(forward_peers(case.weights, format_name))
            return dict(training_peers(case.weights, format_name, case.lora))
        except TORCH_ERRORS as error:
            self._note(f"{case.shape.name} {format_name}", error)
            return {}

    def _fill(
        self,
        case: LayerCase,
        name: str,
        call: Callable[[Batch], Tensor | None],
        rows: list[Row],
        reader: MemoryReader,
    ) -> None:
        tokens = rows[0].tokens

        def bound(batch: Batch) -> Callable[[], object]:
            return lambda: call(batch)

        try:
            calls = [bound(batch) for batch in case.batches(tokens)]
            timing = measure(calls, self._patience, Instruments(partial(reader.rate, rows[0].isa, rows[0].threads)))
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


def forward_peers(weights: Weights, format_name: str) -> dict[str, Forward]:
    """Forward functions by name; empty if PyTorch does not support the format."""
    if format_name == "bf16":
        return {"torch_loop": _looped(_bf16_product(weights)), "torch_grouped": _grouped(weights)}
    if format_name == "int8":
        codes = _int8(weights)
        return {"torch_int8pack": _looped(_int8pack(codes)), "torch_int_mm": _looped(_int_mm(codes))}
    if format_name in INT4_GROUPS:
        return {"torch_int4pack": _looped(_int4pack(weights, INT4_GROUPS[format_name]))}
    return {}


def training_peers(weights: Weights, format_name: str, lora: LoraSlot) -> dict[str, Callable[[Batch], None]]:
    if format_name != "bf16":
        return {}
    return {"torch_autograd": _autograd(weights, lora)}


def _looped(product: Product) -> Forward:
    def forward(batch: Batch) -> Tensor:
        out = torch.zeros(batch.x.shape, dtype=torch.float32)
        routing = batch.weights.view(-1, 1)
        for expert, pairs, tokens in _by_expert(batch):
            gate, up = product(expert, "gate_up", batch.x[tokens]).chunk(2, 1)
            out.index_add_(0, tokens, product(expert, "down", F.silu(gate) * up) * routing[pairs])
        return out.bfloat16()

    return forward


def _by_expert(batch: Batch) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(expert, indices of its (token, expert) pairs, their tokens) for every expert with tokens."""
    order, counts = _sorted_pairs(batch, int(batch.ids.max()) + 1)
    tokens = order // batch.ids.shape[1]
    start = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            yield expert, order[start : start + count], tokens[start : start + count]
        start += count


def _sorted_pairs(batch: Batch, num_experts: int) -> tuple[Tensor, Tensor]:
    """Indices of (token, expert) pairs sorted by expert, and the number of pairs per expert."""
    flat = batch.ids.view(-1)
    return flat.argsort(stable=True), flat.bincount(minlength=num_experts)


def _bf16_product(weights: Weights) -> Product:
    matrices = {"gate_up": weights.gate_up, "down": weights.down}
    return lambda expert, part, rows: F.linear(rows, matrices[part][expert])


def _grouped(weights: Weights) -> Forward:
    gate_up, down = weights.gate_up.transpose(1, 2), weights.down.transpose(1, 2)

    def forward(batch: Batch) -> Tensor:
        order, counts = _sorted_pairs(batch, gate_up.shape[0])
        offsets = counts.cumsum(0).int()
        tokens = order // batch.ids.shape[1]
        gate, up = F.grouped_mm(batch.x[tokens], gate_up, offs=offsets).chunk(2, 1)
        rows = F.grouped_mm(F.silu(gate) * up, down, offs=offsets) * batch.weights.view(-1, 1)[order]
        return torch.zeros(batch.x.shape, dtype=torch.float32).index_add_(0, tokens, rows).bfloat16()

    return forward


def _int8(weights: Weights) -> dict[str, tuple[Tensor, Tensor]]:
    """Codes [E, out, in] int8 and scales [E, out] bfloat16."""
    made = {}
    for part, matrices in (("gate_up", weights.gate_up), ("down", weights.down)):
        codes = torch.empty(matrices.shape, dtype=torch.int8)
        scales = torch.empty(matrices.shape[:2], dtype=torch.bfloat16)
        for expert, matrix in enumerate(matrices):
            codes[expert], scale, _ = to_integers(matrix, 8, matrix.shape[1], False)
            scales[expert] = scale[:, 0]
        made[part] = (codes, scales)
    return made


def _int8pack(weights: Mapping[str, tuple[Tensor, Tensor]]) -> Product:
    def product(expert: int, part: str, rows: Tensor) -> Tensor:
        codes, scales = weights[part]
        return torch.ops.aten._weight_int8pack_mm(rows, codes[expert], scales[expert])

    return product


def _int_mm(weights: Mapping[str, tuple[Tensor, Tensor]]) -> Product:
    def product(expert: int, part: str, rows: Tensor) -> Tensor:
        codes, scales = weights[part]
        step = rows.abs().amax(1, keepdim=True).float().clamp_min(1e-30) / 127
        quantized = (rows / step).round().to(torch.int8)
        return (torch._int_mm(quantized, codes[expert].t()) * step * scales[expert]).bfloat16()

    return product


def _int4pack(weights: Weights, group: int) -> Product:
    packed: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for part, matrices in (("gate_up", weights.gate_up), ("down", weights.down)):
        packed[part] = [_int4_matrix(matrix, group) for matrix in matrices]

    def product(expert: int, part: str, rows: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed[part][expert][0], group, packed[part][expert][1])

    return product


def _int4_matrix(matrix: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(codes packed by PyTorch, [groups, out, 2]: the scale, and the offset that the kernel adds to each product)."""
    codes, scales, _ = to_integers(matrix, 4, group, False)
    words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int() + 8, 1)
    return words, torch.stack([scales, torch.zeros_like(scales)], 2).transpose(0, 1).contiguous()


def _autograd(weights: Weights, lora: LoraSlot) -> Callable[[Batch], None]:
    # One leaf tensor per expert, as in PEFT: the gradient of a slice of one big tensor has the big tensor's size.
    tensors = [t for t in lora.tensors() if t is not None]
    leaves = [[t[expert].clone().requires_grad_() for t in tensors] for expert in range(weights.down.shape[0])]

    def adapted(expert: int, part: int, rows: Tensor) -> Tensor:
        a, b = leaves[expert][2 * part : 2 * part + 2]
        return lora.scaling * F.linear(F.linear(rows, a), b)

    def step(batch: Batch) -> None:
        x, routing = batch.x.clone().requires_grad_(), batch.weights.clone().requires_grad_()
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert, pairs, tokens in _by_expert(batch):
            rows = x[tokens]
            gate, up = F.linear(rows, weights.gate_up[expert]).chunk(2, 1)
            h = F.silu(gate + adapted(expert, 0, rows)) * (up + adapted(expert, 1, rows))
            y = F.linear(h, weights.down[expert]) + adapted(expert, 2, h)
            out = out.index_add(0, tokens, y * routing.view(-1, 1)[pairs])
        out.bfloat16().backward(batch.grad_out)

    return step
