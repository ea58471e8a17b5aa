"""The native step: a model's whole decoder stack as one call (csrc/step/program.h)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kt_runtime import _experts
from kt_runtime.experts.attention import Sequences
from kt_runtime.experts.layer import ExpertLayer
from kt_runtime.experts.native import capsule, resolve_isa, translated_errors


@dataclass(frozen=True, kw_only=True)
class StepLayer:
    """H hidden, N query heads, K key heads, D head size, E experts, S slots of the KV pool.

    `qkv` [(N + 2 K) D, H], `out` [H, N D] and their biases; norms [H] or, of heads, [D]; `gate` [E, H]; `keys` and
    `values` [S, K, D]. All are contiguous and have one dtype, float32 or bfloat16. They are read and written in place.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor
    key_norm: Tensor
    keys: Tensor
    values: Tensor
    out: Tensor
    out_bias: Tensor | None
    post_norm: Tensor
    gate: Tensor
    experts: ExpertLayer


class Step:
    """Built once for a model; `run` computes a batch. Not thread-safe. Keeps the tensors alive.

    `scalars`: heads, key_heads, head_size, top_k, normalises, epsilon, scaling. `tensors`: embedding [V, H],
    final_norm [H], angles [P, D] (of each position D / 2 cosines, then D / 2 sines). InvalidValueError: a tensor that
    does not fit.
    """

    def __init__(
        self,
        scalars: Mapping[str, float],
        tensors: Mapping[str, Tensor],
        layers: Sequence[StepLayer],
        *,
        isa: str | None = None,
        num_threads: int | None = None,
    ) -> None:
        threads = _experts.default_num_threads() if num_threads is None else num_threads
        table = {
            **scalars,
            **{name: capsule(tensor, name) for name, tensor in tensors.items()},
            "layers": [_named(layer, f"layers[{index}]") for index, layer in enumerate(layers)],
        }
        self._hidden, self._dtype = tensors["embedding"].shape[1], tensors["embedding"].dtype
        with translated_errors():
            self._native = _experts.Step(resolve_isa(isa), threads, table)

    def run(self, ids: Tensor, positions: Tensor, slots: Tensor, sequences: Sequences) -> tuple[Tensor, list[int]]:
        """T new tokens, sequence by sequence -> hidden states [T, H] after the final norm.

        ids, positions, slots: int64 [T]; the new keys and values are written to `slots`. `sequences`: where the keys of
        each sequence lie, those of its new tokens included.

        Also returns the tokens whose activations were NaN or Inf before the experts of some layer: the experts returned
        zeros for them there. InvalidValueError: an id, position, slot or length out of range; then nothing has been
        written.
        """
        out = torch.empty(len(ids), self._hidden, dtype=self._dtype, device="cpu")
        with translated_errors():
            return out, self._native.run(
                capsule(ids, "ids"),
                capsule(positions, "positions"),
                capsule(slots, "slots"),
                capsule(sequences.rows, "sequences"),
                None if sequences.slots is None else capsule(sequences.slots, "table"),
                capsule(out, "out"),
            )

    @property
    def scratch_bytes(self) -> int:
        """Memory kept for a batch's activations. Freed when about 3,000 batches needed less than half of it."""
        return self._native.scratch_bytes


def _named(layer: StepLayer, where: str) -> dict[str, object]:
    named: dict[str, object] = {}
    for field in fields(layer):
        value = getattr(layer, field.name)
        is_tensor = isinstance(value, Tensor)
        named[field.name] = capsule(value, f"{where}.{field.name}") if is_tensor else value
    return {**named, "experts": layer.experts.native()}
