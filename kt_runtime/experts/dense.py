"""What a decoder layer computes on the CPU except attention and routed experts: linear layers, those of single heads,
LoRA, RMSNorm, SwiGLU, rotary embedding, and the choice of experts (csrc/ops/dense, csrc/ops/router).

Weights are row-major and read in place. A row of a result depends on its own row of x, on the weights and on the
instruction set: not on the other rows, on how rows are cut into calls, or on the number of threads. Serving and
training call the same functions, so both get the same bits. A row with NaN or Inf has a result like torch's; the other
rows do not change. Not differentiable.

The process has one instruction set and number of threads for these operations: the best ones, or those of `configure`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kt_runtime import _experts
from kt_runtime.experts.native import capsule, resolve_isa, translate
from kt_runtime.experts.packed.weight import PackedWeight

DTYPES = (torch.float32, torch.bfloat16)

_native: _experts.Dense | None = None


def configure(isa: str | None = None, num_threads: int | None = None) -> None:
    """Sets the instruction set, one of `available_isas()`, and the number of threads; None: the best.

    UnknownNameError: an instruction set that is not available. InvalidValueError: fewer than one thread.
    """
    global _native
    threads = _experts.default_num_threads() if num_threads is None else num_threads
    try:
        _native = _experts.Dense(resolve_isa(isa), threads)
    except _experts.NativeError as error:
        raise translate(error) from None


def is_supported(x: Tensor, weight: Tensor) -> bool:
    """Whether the operations take these tensors: on the CPU, of one dtype, float32 or bfloat16, contiguous rows of
    weights."""
    return (
        x.is_cpu
        and weight.is_cpu
        and x.dtype == weight.dtype
        and x.dtype in DTYPES
        and (weight.stride(-1) == 1 or weight.shape[-1] <= 1)
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [..., K], weight [N, K], bias [N] or None -> [..., N] in x's dtype or `out_dtype`.

    Each of them is float32 or bfloat16. Sums are float32 and include the bias; the result is rounded once. By a
    `PackedWeight` float32 rows are multiplied as they are, bfloat16 rows in int8 (csrc/ops/packed/linear.h).
    InvalidValueError: a shape, dtype, device or stride that is not supported, named with its value.
    """
    rows = _rows(x)
    out = torch.empty(rows.shape[0], weight.shape[0], dtype=out_dtype or x.dtype, device="cpu")
    added = None if bias is None else capsule(bias, "bias")
    try:
        if isinstance(weight, PackedWeight):
            engine().linear_packed(capsule(rows, "x"), weight.native, added, capsule(out, "out"))
        else:
            engine().linear(capsule(rows, "x"), capsule(weight, "weight"), added, capsule(out, "out"))
    except _experts.NativeError as error:
        raise translate(error) from None
    return out.view(*x.shape[:-1], weight.shape[0])


def linear_backward(by_out: Tensor, weight: Tensor) -> Tensor:
    """The gradient of `linear` for x: by_out [..., N], weight [N, K] of its dtype -> [..., K].

    Sums are float32, over the rows of weight in ascending order, and rounded once.
    """
    rows = _rows(by_out)
    by_x = torch.empty(rows.shape[0], weight.shape[1], dtype=by_out.dtype, device="cpu")
    try:
        if isinstance(weight, PackedWeight):
            engine().linear_packed_backward(capsule(rows, "by_out"), weight.native, capsule(by_x, "by_x"))
        else:
            engine().linear_backward(capsule(rows, "by_out"), capsule(weight, "weight"), capsule(by_x, "by_x"))
    except _experts.NativeError as error:
        raise translate(error) from None
    return by_x.view(*by_out.shape[:-1], weight.shape[1])


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """weight * x / rms(x): x [..., H], weight [H] of x's dtype -> [..., H].

    Statistics are float32; the normalised state is rounded to x's dtype before it is multiplied by the weight.
    """
    return _norm(x, None, weight, epsilon, None)[0]


def rms_norm_with_inverse(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """`rms_norm`, and 1 / rms(x) [..., 1] in float32."""
    inverse = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device="cpu")
    return _norm(x, None, weight, epsilon, inverse)[0], inverse


def rms_norm_backward(by_out: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    """The gradient of `rms_norm` for x, in x's dtype: by_out and x [..., H], weight [H], inverse [..., 1] of x.

    Computed in float32 and rounded once. The same bits on every ISA.
    """
    by_x = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    try:
        engine().rms_norm_backward(
            capsule(_rows(by_out), "by_out"),
            capsule(_rows(x), "x"),
            capsule(weight, "weight"),
            capsule(inverse.view(-1), "inverse"),
            capsule(by_x.view(-1, x.shape[-1]), "by_x"),
        )
    except _experts.NativeError as error:
        raise translate(error) from None
    return by_x


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """total = x + residual, rounded to their dtype -> (`rms_norm` of total, total)."""
    out, total = _norm(x, residual, weight, epsilon, None)
    assert total is not None
    return out, total


def choose_experts(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> float32 weights [T, K] and int32 ids [T, K]: the largest of the softmax, larger ones first.

    Of equal logits the first is chosen. `normalise`: the weights of a token are divided by their sum. NaN or +Inf among
    a token's logits makes its weights NaN. InvalidValueError: more experts per token than there are.
    """
    rows = _rows(logits)
    weights = torch.empty(rows.shape[0], top_k, dtype=torch.float32, device="cpu")
    ids = torch.empty(rows.shape[0], top_k, dtype=torch.int32, device="cpu")
    try:
        engine().choose_experts(capsule(rows, "logits"), normalise, capsule(weights, "weights"), capsule(ids, "ids"))
    except _experts.NativeError as error:
        raise translate(error) from None
    return weights, ids


def weigh_experts(logits: Tensor, ids: Tensor, normalise: bool) -> Tensor:
    """logits [T, E] and the experts ids [T, K] -> their float32 weights [T, K].

    Where the ids are those of `choose_experts`, in its order, the weights have its bits. InvalidValueError: an id that
    is not 0 to E - 1.
    """
    given, weights = _given(ids)
    try:
        engine().weigh_experts(
            capsule(_rows(logits), "logits"), normalise, capsule(given, "ids"), capsule(weights, "weights")
        )
    except _experts.NativeError as error:
        raise translate(error) from None
    return weights


def _given(ids: Tensor) -> tuple[Tensor, Tensor]:
    """`ids` in the layout that the kernels read, and an uninitialised tensor for their weights."""
    return ids.to(torch.int32).contiguous(), torch.empty(ids.shape, dtype=torch.float32, device="cpu")


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, inverse: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    rows = _rows(x)
    added = None if residual is None else _rows(residual)
    out = torch.empty(rows.shape, dtype=x.dtype, device="cpu")
    total = None if added is None else torch.empty(rows.shape, dtype=x.dtype, device="cpu")
    try:
        engine().rms_norm(
            capsule(rows, "x"),
            None if added is None else capsule(added, "residual"),
            capsule(weight, "weight"),
            float(epsilon),
            capsule(out, "out"),
            None if total is None else capsule(total, "total"),
            None if inverse is None else capsule(inverse.view(-1), "inverse"),
        )
    except _experts.NativeError as error:
        raise translate(error) from None
    return out.view(x.shape), None if total is None else total.view(x.shape)


def _rows(x: Tensor) -> Tensor:
    """x [..., K] -> [M, K] with contiguous rows, without a copy where the strides permit."""
    return with_adjacent_columns(x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0))


def engine() -> _experts.Dense:
    """The native operations, with the instruction set and the number of threads of this process."""
    if _native is None:
        configure()
    assert _native is not None
    return _native


def linear_heads(
    x: Tensor, weight: Tensor, out: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """A linear layer of its own for each head: x [T, N, K], weight [N, O, K] -> [T, N, O] in x's dtype or `out_dtype`.

    A head's result has the bits of `linear` with its weight. `out`: where the result is written, if given.
    """
    if out is None:
        out = torch.empty(*x.shape[:2], weight.shape[1], dtype=out_dtype or x.dtype, device="cpu")
    try:
        engine().linear_heads(capsule(with_adjacent_columns(x), "x"), capsule(weight, "weight"), capsule(out, "out"))
    except _experts.NativeError as error:
        raise translate(error) from None
    return out


def linear_heads_backward(by_out: Tensor, weight: Tensor) -> Tensor:
    """The gradient of `linear_heads` for x: by_out [T, N, O], weight [N, O, K] of its dtype -> [T, N, K].

    A head's result has the bits of `linear_backward` with its weight.
    """
    by_x = torch.empty(*by_out.shape[:2], weight.shape[2], dtype=by_out.dtype, device="cpu")
    try:
        engine().linear_heads_backward(
            capsule(with_adjacent_columns(by_out), "by_out"), capsule(weight, "weight"), capsule(by_x, "by_x")
        )
    except _experts.NativeError as error:
        raise translate(error) from None
    return by_x


def rotate(x: Tensor, angles: Tensor, positions: Tensor, interleaved: bool, *, inverse: bool = False) -> Tensor:
    """Rotary embedding: x [T, N, D], angles [P, R] of its dtype, positions [T] int64 -> [T, N, D].

    `angles`: cosines, then sines of each position. The first R elements of a head are rotated: pairs of adjacent
    elements if `interleaved`, else of elements R / 2 apart. Every product and sum is rounded to the dtype. The same
    bits on every ISA. `inverse`: by the negative angles. InvalidValueError: a position that `angles` does not have.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    try:
        engine().rotate(
            capsule(with_adjacent_columns(x), "x"),
            capsule(angles, "angles"),
            capsule(positions, "positions"),
            interleaved,
            inverse,
            capsule(out, "out"),
        )
    except _experts.NativeError as error:
        raise translate(error) from None
    return out


def linear_added(x: Tensor, weight: Tensor, alpha: float, base: Tensor | None, out: Tensor | None = None) -> Tensor:
    """base + alpha * x weight^T: x [M, K], weight [N, K], base [M, N] or None -> [M, N] in x's dtype.

    The product (with the bits of `linear`), the one with alpha and the sum are float32, each rounded; the result is
    rounded once. `out`: where the result is written, if given; it may be `base`.
    """
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device="cpu")
    added = None if base is None else capsule(with_adjacent_columns(base), "base")
    try:
        engine().linear_added(
            capsule(with_adjacent_columns(x), "x"), capsule(weight, "weight"), float(alpha), added, capsule(out, "out")
        )
    except _experts.NativeError as error:
        raise translate(error) from None
    return out


def inner_product(a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """alpha * a^T b: a [M, R], b [M, N], float32 or bfloat16 -> float32 [R, N]. Meant for few R.

    Sums are float32, over the rows in ascending order; the bits do not depend on the number of threads.
    """
    out = torch.empty(a.shape[1], b.shape[1], dtype=torch.float32, device="cpu")
    left, right = capsule(with_adjacent_columns(a), "a"), capsule(with_adjacent_columns(b), "b")
    try:
        engine().inner_product(left, right, float(alpha), capsule(out, "out"))
    except _experts.NativeError as error:
        raise translate(error) from None
    return out


def silu_and_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in float32, rounded once: both [..., I], float32 or bfloat16. The same bits on every ISA."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device="cpu")
    try:
        engine().silu_and_multiply(
            capsule(_rows(gate), "gate"), capsule(_rows(up), "up"), capsule(out.view(-1, out.shape[-1]), "out")
        )
    except _experts.NativeError as error:
        raise translate(error) from None
    return out


def silu_and_multiply_backward(by_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `silu_and_multiply` for gate and up: all [..., I], of one dtype. Float32, each rounded once."""
    gradients = [torch.empty(gate.shape, dtype=gate.dtype, device="cpu") for _ in range(2)]
    by_gate, by_up = (tensor.view(-1, tensor.shape[-1]) for tensor in gradients)
    try:
        engine().silu_and_multiply_backward(
            capsule(_rows(by_out), "by_out"),
            capsule(_rows(gate), "gate"),
            capsule(_rows(up), "up"),
            capsule(by_gate, "by_gate"),
            capsule(by_up, "by_up"),
        )
    except _experts.NativeError as error:
        raise translate(error) from None
    return gradients[0], gradients[1]


def sigmoid_and_multiply(gate: Tensor, x: Tensor) -> Tensor:
    """sigmoid(gate) * x in float32, rounded once: gate [..., G], x [..., I], both float32 or bfloat16; of a row, each
    gate multiplies I / G adjacent elements. The same bits on every ISA."""
    out = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    try:
        engine().sigmoid_and_multiply(
            capsule(_rows(gate), "gate"), capsule(_rows(x), "x"), capsule(out.view(-1, out.shape[-1]), "out")
        )
    except _experts.NativeError as error:
        raise translate(error) from None
    return out


def sigmoid_and_multiply_backward(by_out: Tensor, gate: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `sigmoid_and_multiply` for gate [..., G] and x [..., I], of their dtype, each rounded once."""
    by_gate, by_x = (torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in (gate, x))
    try:
        engine().sigmoid_and_multiply_backward(
            capsule(_rows(by_out), "by_out"),
            capsule(_rows(gate), "gate"),
            capsule(_rows(x), "x"),
            capsule(by_gate.view(-1, by_gate.shape[-1]), "by_gate"),
            capsule(by_x.view(-1, by_x.shape[-1]), "by_x"),
        )
    except _experts.NativeError as error:
        raise translate(error) from None
    return by_gate, by_x


@dataclass(frozen=True)
class GroupedRouting:
    """How DeepSeek's routers choose among experts in groups (csrc/ops/router/grouped_router.h)."""

    groups: int
    top_groups: int
    """Groups whose experts can be chosen."""
    top_k: int
    is_sigmoid: bool
    """Scores are sigmoids of the logits (DeepSeek-V3); else their softmax."""
    normalises: bool
    scaling: float
    """`routed_scaling_factor`, a factor of the weights."""


def choose_from_groups(logits: Tensor, bias: Tensor | None, routing: GroupedRouting) -> tuple[Tensor, Tensor]:
    """logits [T, E] and bias [E], float32 -> float32 weights [T, K] and int32 ids [T, K], larger ranks first.

    Of equal ranks the first expert is chosen. The same bits on every ISA. InvalidValueError: groups that do not divide
    the experts, or fewer experts in `top_groups` groups than are chosen.
    """
    rows = _rows(logits)
    weights = torch.empty(rows.shape[0], routing.top_k, dtype=torch.float32, device="cpu")
    ids = torch.empty(rows.shape[0], routing.top_k, dtype=torch.int32, device="cpu")
    try:
        engine().choose_from_groups(
            capsule(rows, "logits"),
            None if bias is None else capsule(bias, "bias"),
            routing.groups,
            routing.top_groups,
            routing.is_sigmoid,
            routing.normalises,
            routing.scaling,
            capsule(weights, "weights"),
            capsule(ids, "ids"),
        )
    except _experts.NativeError as error:
        raise translate(error) from None
    return weights, ids


def weigh_from_groups(logits: Tensor, ids: Tensor, routing: GroupedRouting) -> Tensor:
    """logits [T, E] float32 and the experts ids [T, K], of any groups -> their float32 weights [T, K].

    The router's bias has no part in them. Bits and errors as `weigh_experts`.
    """
    given, weights = _given(ids)
    try:
        engine().weigh_from_groups(
            capsule(_rows(logits), "logits"),
            routing.is_sigmoid,
            routing.normalises,
            routing.scaling,
            capsule(given, "ids"),
            capsule(weights, "weights"),
        )
    except _experts.NativeError as error:
        raise translate(error) from None
    return weights


def with_adjacent_columns(x: Tensor) -> Tensor:
    """x, or a copy where its last dimension is strided."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
