"""Merges an adapter into the base weights: W + (alpha / rank) B A, rounded once to the weight's dtype."""

from __future__ import annotations

import torch

from kt_runtime.adapters.tensors import AdapterTensors, LoraPair
from kt_runtime.errors import NumericsError

ROWS_AT_ONCE = 1024
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The projections whose rows a fused tensor of experts holds, in order."""


class Merger:
    """Merges the tensors of a checkpoint one by one, by their Hugging Face names; each routed expert separately, or a
    layer's experts in transformers' fused tensors `NAME.gate_up_proj` [E, 2 I, H] and `NAME.down_proj` [E, H, I], or
    [E, H, 2 I] and [E, I, H] if `is_transposed`.

    `left`: names of adapted matrices that have not been merged yet.
    """

    def __init__(self, adapter: AdapterTensors, *, is_transposed: bool = False) -> None:
        self._scaling, self._is_transposed = adapter.scaling, is_transposed
        flat = adapter.tensors
        modules = [name.removesuffix(".lora_A.weight") for name in flat if name.endswith(".lora_A.weight")]
        self._pairs = {
            f"{module}.weight": LoraPair(flat[f"{module}.lora_A.weight"], flat[f"{module}.lora_B.weight"])
            for module in modules
        }
        self.left = {name for name, pair in self._pairs.items() if bool(pair.a.any()) and bool(pair.b.any())}

    def merged(self, name: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`weight` as `dtype`, with its adapter pair merged if it has one. `weight` itself stays unchanged.

        Raises NumericsError, naming the matrix, if the sum overflows `dtype`: float16 ends at 65504.
        """
        if weight.dim() == 3:
            return self._merged_fused(name, weight, dtype)
        if name not in self.left:
            return weight.to(dtype)
        self.left.discard(name)
        merged = add_pair(weight, self._pairs[name], self._scaling, dtype)
        _check_finite(name, merged)
        return merged

    def _merged_fused(self, name: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        parent, _, last = name.rpartition(".")
        projections = FUSED.get(last, ())
        result = weight.to(dtype, copy=True)
        if self._is_transposed:
            weight, result = weight.mT, result.mT
        for expert, matrix in enumerate(weight):
            parts = zip(projections, matrix.chunk(len(projections)), strict=True) if projections else ()
            for part, (projection, rows) in enumerate(parts):
                merged = self.merged(f"{parent}.{expert}.{projection}.weight", rows, dtype)
                result[expert, part * len(rows) : (part + 1) * len(rows)] = merged
        return result.mT if self._is_transposed else result


def _check_finite(name: str, merged: torch.Tensor) -> None:
    finite = torch.isfinite(merged)
    if not bool(finite.all()):
        row, column = (int(index) for index in (~finite).nonzero()[0])
        kind = str(merged.dtype).removeprefix("torch.")
        raise NumericsError(
            f"{name}[{row}, {column}]: with the adapter added it is {float(merged[row, column])} in {kind}, whose "
            f"largest value is {torch.finfo(merged.dtype).max:g}; write another type (--dtype float32 or bfloat16)"
        )


def add_pair(weight: torch.Tensor, pair: LoraPair, scaling: float, dtype: torch.dtype) -> torch.Tensor:
    """W [out, in] + scaling * B A as `dtype`, rounded once: computed in float32, for a float32 result in float64."""
    computed = torch.float64 if dtype == torch.float32 else torch.float32
    a, b = pair.a.to(computed), pair.b.to(computed)
    result = torch.empty(weight.shape, dtype=dtype)
    for start in range(0, weight.shape[0], ROWS_AT_ONCE):
        some = slice(start, start + ROWS_AT_ONCE)
        result[some] = torch.addmm(weight[some].to(computed), b[some], a, alpha=scaling)
    return result
