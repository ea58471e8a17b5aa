"""Attention on the CPU over keys and values that are read in place: decode, extend and training. The kernel is
csrc/ops/attention/attention.h.

A query's result depends on its q, on its keys and values in order, and on the instruction set: not on the other
queries of a call, on how a prompt is cut into calls, on where the keys lie, or on the number of threads. So serving and
training get the same bits. NaN and Inf reach the queries that see them. Not differentiable.

The instruction set and the number of threads are those of `kt_runtime.experts.dense`.
T queries, N query heads, K key heads, D key size, V value size.

`gated_delta` is the linear attention of Gated DeltaNet layers (csrc/ops/delta/gated_delta.h), with the same properties:
T tokens, HK key heads of K elements, HV value heads of V, C = 2 HK K + HV V channels, W taps of the filter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kt_runtime import _experts
from kt_runtime.experts import dense
from kt_runtime.experts.native import capsule, translate, translated_errors


@dataclass(frozen=True)
class Sequences:
    """The sequences of a call, in the order of their queries. Query t of a sequence sees its keys 0 to prefix + t."""

    rows: Tensor
    """int64 [B, 4]: first row of q, number of queries, prefix (keys before the first query's own), and the place of the
    keys: a row of `slots`, or the first row of keys."""
    slots: Tensor | None
    """int32 [R, L]: the row of each key, by position in the sequence, such as SGLang's `req_to_token`. None: a
    sequence's keys are adjacent rows."""

    @property
    def num_queries(self) -> int:
        return int(self.rows[:, 1].sum())


def paged(slots: Tensor, places: Tensor, prefixes: Tensor, queries: Tensor) -> Sequences:
    """Sequences over a pool: [B] rows of `slots`, [B] prefixes, [B] numbers of new queries. Their queries adjoin."""
    counts = queries.to(torch.int64)
    return Sequences(torch.stack([counts.cumsum(0) - counts, counts, prefixes, places], dim=1), slots)


def in_chunks(sequences: Sequences, chunk: int) -> Sequences:
    """The sequences of chunked attention, in which a query sees the keys of its own chunk of `chunk` positions only.

    Each sequence is cut into one for each chunk that has queries, whose first key is the chunk's first
    (csrc/ops/attention/chunked.h); slots are copied. Where none is longer than a chunk, the result is `sequences`.
    """
    rows = sequences.rows.tolist()
    if all(prefix + queries <= chunk for _, queries, prefix, _ in rows):
        return sequences
    parts: list[list[int]] = []
    own: list[Tensor] = []
    for first_query, queries, prefix, place in rows:
        at = 0
        while at < queries:
            inside = (prefix + at) % chunk
            first_key, count = prefix + at - inside, min(queries - at, chunk - inside)
            if sequences.slots is None:
                parts.append([first_query + at, count, inside, place + first_key])
            else:
                parts.append([first_query + at, count, inside, len(own)])
                own.append(sequences.slots[place, first_key : first_key + inside + count])
            at += count
    slots = None if sequences.slots is None else torch.nn.utils.rnn.pad_sequence(own, batch_first=True)
    return Sequences(torch.tensor(parts), slots)


def contiguous(batch: int, queries: int, keys: int) -> Sequences:
    """`batch` sequences with the last `queries` of `keys` tokens each; their keys lie one after another."""
    place = torch.arange(batch)
    rest = torch.tensor([queries, keys - queries]).expand(batch, 2)
    return Sequences(torch.cat([(place * queries)[:, None], rest, (place * keys)[:, None]], dim=1), None)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    sequences: Sequences,
    scaling: float,
    logit_cap: float = 0.0,
    *,
    sinks: Tensor | None = None,
    window: int = 0,
    out_dtype: torch.dtype | None = None,
    log_sums: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Tensor:
    """q [T, N, D], keys [rows, K, D], values [rows, K, V] -> [T, N, V] in q's dtype or `out_dtype`, rounded once.

    q is float32 or bfloat16; keys and values have one of both. Scores, softmax and sums are float32. A `logit_cap`
    above 0 caps scores softly: cap * tanh(score / cap). `sinks` [N], float32: a score for each head that takes part in
    the softmax, without a value. `window` above 0: a query sees at most so many keys, its own and those before it.
    `log_sums` [T, N], float32, is an optional output: log of the sum over keys and sink of exp(score). Rows of q that
    belong to no sequence give zeros. `chosen` [T, top_k], of `select_keys`: a query sees these keys only.

    InvalidValueError: a shape, dtype, device or stride that is not supported, or a key outside of the pool, named with
    its value. Then nothing has been read.
    """
    engine = dense.engine()
    shape = (*q.shape[:-1], values.shape[-1])
    make = torch.empty if sequences.num_queries == len(q) else torch.zeros
    out = make(shape, dtype=out_dtype or q.dtype, device="cpu")
    try:
        _experts.attend(
            isa=engine.isa,
            num_threads=engine.num_threads,
            q=capsule(dense.with_adjacent_columns(q), "q"),
            keys=capsule(keys, "keys"),
            values=capsule(values, "values"),
            out=capsule(out, "out"),
            log_sums=None if log_sums is None else capsule(log_sums, "log_sums"),
            sequences=capsule(sequences.rows, "sequences"),
            slots=None if sequences.slots is None else capsule(sequences.slots, "slots"),
            scaling=float(scaling),
            logit_cap=float(logit_cap),
            sinks=None if sinks is None else capsule(sinks, "sinks"),
            window=window,
            chosen=None if chosen is None else capsule(chosen, "chosen"),
        )
    except _experts.NativeError as error:
        raise translate(error) from None
    return out


def attend_backward(
    by_out: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    log_sums: Tensor,
    sequences: Sequences,
    scaling: float,
    window: int = 0,
    chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attend` for q [T, N, D], keys [rows, K, D] and values [rows, K, V], in their dtypes.

    `by_out` [T, N, V]: the gradient of its result. `out` [T, N, V] and `log_sums` [T, N]: what `attend` gave, float32;
    sinks are part of the latter, and are frozen.
    The sequences have no slots, and their queries and keys adjoin and cover all rows; else InvalidValueError. Sums are
    float32 and rounded once; the bits do not depend on the number of threads. Keys and values that share memory have
    two separate gradients.
    """
    engine = dense.engine()
    found = tuple(torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in (q, keys, values))
    by_q, by_keys, by_values = (capsule(x, name) for x, name in zip(found, ("by_q", "by_k", "by_v"), strict=True))
    try:
        _experts.attend_backward(
            isa=engine.isa,
            num_threads=engine.num_threads,
            by_out=capsule(dense.with_adjacent_columns(by_out), "by_out"),
            q=capsule(dense.with_adjacent_columns(q), "q"),
            keys=capsule(keys, "keys"),
            values=capsule(values, "values"),
            out=capsule(out, "out"),
            log_sums=capsule(log_sums, "log_sums"),
            sequences=capsule(sequences.rows, "sequences"),
            scaling=float(scaling),
            window=window,
            by_q=by_q,
            by_keys=by_keys,
            by_values=by_values,
            chosen=None if chosen is None else capsule(chosen, "chosen"),
        )
    except _experts.NativeError as error:
        raise translate(error) from None
    return found[0], found[1], found[2]


def prepare_index_rows(
    q: Tensor, k: Tensor, norm_weight: Tensor, norm_bias: Tensor, angles: Tensor, positions: Tensor, interleaved: bool
) -> None:
    """Rotates an indexer's queries q [T, M, E], and norms (LayerNorm, float32 weight and bias [E]) and rotates its keys
    k [T, E], in place (csrc/ops/router/indexer.h). `angles` [P, R]: cosines, then sines of each position, for the
    first R elements; `positions` [T] int64."""
    engine = dense.engine()
    tensors = {
        "q": q,
        "k": k,
        "norm_weight": norm_weight,
        "norm_bias": norm_bias,
        "angles": angles,
        "positions": positions,
    }
    with translated_errors():
        _experts.prepare_index_rows(
            engine.isa, engine.num_threads, *(capsule(tensor, name) for name, tensor in tensors.items()), interleaved
        )


def select_keys(q: Tensor, weights: Tensor, keys: Tensor, sequences: Sequences, top_k: int) -> Tensor | None:
    """The rows of the keys that an indexer chooses for each query, by position, int32 [T, top_k].

    q [T, M, E] and keys [rows, E] of one dtype, weights [T, M] float32. The score of a key is the sum over the heads of
    weight * max(<q, k>, 0); the largest are chosen, of equal ones the first. Rows of queries that see no more than
    `top_k` keys are undefined, for they see all; None: that holds for every query. A query's choice does not depend on
    the other queries of the call, on how a prompt is cut into calls, or on where the keys lie.
    """
    longest = max((prefix + queries for _, queries, prefix, _ in sequences.rows.tolist() if queries), default=0)
    if longest <= top_k:
        return None
    engine = dense.engine()
    chosen = torch.empty(len(q), top_k, dtype=torch.int32, device="cpu")
    with translated_errors():
        _experts.select_keys(
            engine.isa,
            engine.num_threads,
            capsule(q, "q"),
            capsule(weights, "weights"),
            capsule(keys, "keys"),
            capsule(sequences.rows, "sequences"),
            None if sequences.slots is None else capsule(sequences.slots, "slots"),
            capsule(chosen, "chosen"),
        )
    return chosen


@dataclass(frozen=True)
class DeltaHeads:
    """HK, HV, K and V. Value head h reads key head h // (HV // HK)."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    def tensor(self) -> Tensor:
        return torch.tensor([self.key_heads, self.value_heads, self.key_size, self.value_size])


@dataclass(frozen=True)
class DeltaWeights:
    """`filter` [C, W] of the model's dtype: the short convolution. `log_rate` [HV] and `bias` [HV]: of the decays,
    float32 or the model's dtype; transformers' `A_log` and `dt_bias`."""

    heads: DeltaHeads
    filter: Tensor
    log_rate: Tensor
    bias: Tensor


@dataclass(frozen=True)
class DeltaStates:
    """What sequences keep between calls, by slot; a call changes it. `inputs` [S, C, W - 1] of the model's dtype: the
    last inputs of the convolution, the newest last. `states` [S, HV, K, V] float32."""

    inputs: Tensor
    states: Tensor


def gated_delta(
    x: Tensor, a: Tensor, b: Tensor, weights: DeltaWeights, sequences: Tensor, kept: DeltaStates | None = None
) -> Tensor:
    """x [T, C]: of each row queries, keys, values; a, b [T, HV] -> [T, HV * V] of x's dtype, rounded once.

    `sequences` int64 [B, 4]: first row, number of rows, slot in `kept`, and 1 where the slot has a state, 0 where the
    sequence begins. Without `kept` all of them begin and nothing is kept. Rows of no sequence give zeros.

    InvalidValueError: a shape, dtype, device, stride or slot that is not supported, named with its value; then nothing
    has changed.
    """
    engine = dense.engine()
    heads = weights.heads
    out = x.new_zeros(len(x), heads.value_heads * heads.value_size)
    try:
        _experts.gated_delta(
            isa=engine.isa,
            num_threads=engine.num_threads,
            **_delta_operands(x, a, b, weights, sequences),
            inputs=None if kept is None else capsule(kept.inputs, "inputs"),
            states=None if kept is None else capsule(kept.states, "states"),
            out=capsule(out, "out"),
        )
    except _experts.NativeError as error:
        raise translate(error) from None
    return out


def gated_delta_backward(
    by_out: Tensor, x: Tensor, a: Tensor, b: Tensor, weights: DeltaWeights, sequences: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `gated_delta` for x, a and b, of sequences that begin and keep nothing: by_out [T, HV * V].

    Sums are float32 and rounded once; the bits do not depend on the number of threads. Rows of no sequence give zeros.
    """
    engine = dense.engine()
    by_x, by_a, by_b = x.new_zeros(x.shape), a.new_zeros(a.shape), b.new_zeros(b.shape)
    try:
        _experts.gated_delta_backward(
            isa=engine.isa,
            num_threads=engine.num_threads,
            by_out=capsule(dense.with_adjacent_columns(by_out), "by_out"),
            **_delta_operands(x, a, b, weights, sequences),
            by_x=capsule(by_x, "by_x"),
            by_a=capsule(by_a, "by_a"),
            by_b=capsule(by_b, "by_b"),
        )
    except _experts.NativeError as error:
        raise translate(error) from None
    return by_x, by_a, by_b


def _delta_operands(x: Tensor, a: Tensor, b: Tensor, weights: DeltaWeights, sequences: Tensor) -> dict[str, object]:
    tensors = {
        "x": dense.with_adjacent_columns(x),
        "a": dense.with_adjacent_columns(a),
        "b": dense.with_adjacent_columns(b),
        "filter": dense.with_adjacent_columns(weights.filter),
        "log_rate": weights.log_rate,
        "bias": weights.bias,
        "heads": weights.heads.tensor(),
        "sequences": sequences,
    }
    return {name: capsule(tensor, name) for name, tensor in tensors.items()}
