"""The one validator of adapters: for adapters that are read, saved by training, or published."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from kt_runtime.adapters.tensors import AdapterTensors, Contents, LoraPair, expected_shapes, largest, missing_members
from kt_runtime.errors import AdapterError, suggestion
from kt_runtime.families import Family, LoraModule
from kt_runtime.families.targets import NEVER_ADAPTED

LARGEST_ALPHA = torch.finfo(torch.float32).max
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_adapter(
    adapter: AdapterTensors,
    family: Family,
    config: Mapping[str, Any],
    max_rank: int,
    where: str = "adapter",
    contents: Contents | None = None,
) -> None:
    """Raises AdapterError, beginning with `where`, unless the adapter can be served and trained unchanged.

    One rank from 1 to `max_rank`, a finite positive alpha, at least one module, only modules that the model has, fused
    groups complete, tensors of the right shape and of a known dtype, every number finite. `contents`: those of the
    tensors if they are known, so that the tensors are not read again.
    """
    check_rank(adapter.rank, max_rank, where)
    check_alpha(adapter.alpha, where)
    if not adapter.modules:
        raise AdapterError(f"{where}: has no LoRA tensors")
    known = {module.name: module for module in family.lora_modules(config)}
    for name, pair in adapter.modules.items():
        if name not in known:
            raise unknown_module(name, list(known), family, where)
        _check_pair(known[name], pair, adapter.rank, where, contents or {})
    missing = missing_members(adapter, family, config)
    if missing:
        raise AdapterError(
            f"{where}: {missing[0].name!r} is missing although others of its group ({missing[0].source}) are there; "
            "a fused group must be complete"
        )


def check_rank(rank: Any, max_rank: int, where: str, key: str = "r") -> int:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise AdapterError(f"{where}: {key} (the rank) is {rank!r}; expected an integer from 1 to {max_rank}")
    if rank > max_rank:
        raise AdapterError(
            f"{where}: {key} (the rank) is {rank}, above this server's largest, {max_rank}; "
            "the server's limit is set when it starts (--max-lora-rank)"
        )
    return rank


def check_alpha(alpha: Any, where: str, key: str = "lora_alpha") -> float:
    """`alpha` as a float: finite, above 0, and within float32, the dtype of the scaling."""
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if is_number and 0 < alpha <= LARGEST_ALPHA:
        return float(alpha)
    raise AdapterError(f"{where}: {key} is {alpha!r:.40}; expected a number above 0, at most {LARGEST_ALPHA:g}")


def unknown_module(name: str, known: list[str], family: Family, where: str) -> AdapterError:
    """The error for a module that LoRA can't adapt in this model; names router, embeddings and lm_head explicitly."""
    if name.rpartition(".")[2] in NEVER_ADAPTED:
        return AdapterError(f"{where}: {name!r}: router, embeddings and lm_head are never adapted here")
    return AdapterError(
        f"{where}: {name!r} is no module that LoRA can adapt in this {family.name} model{suggestion(name, known)}"
    )


def check_shape(key: str, tensor: torch.Tensor, expected: tuple[int, ...], where: str) -> None:
    if tuple(tensor.shape) != expected:
        raise AdapterError(f"{where}: {key!r} has shape {list(tensor.shape)}; expected {list(expected)}")


def _check_pair(module: LoraModule, pair: LoraPair, rank: int, where: str, contents: Contents) -> None:
    for letter, tensor, expected in zip("AB", pair, expected_shapes(module, rank), strict=True):
        key = f"{module.name}.lora_{letter}.weight"
        check_shape(key, tensor, expected, where)
        if tensor.dtype not in DTYPES:
            raise AdapterError(f"{where}: {key!r} is {tensor.dtype}; expected one of {', '.join(map(str, DTYPES))}")
        content = contents.get(f"{module.name}.lora_{letter}")
        if not (_is_finite(tensor) if content is None else math.isfinite(content.largest)):
            raise AdapterError(f"{where}: {_non_finite_key(module, letter, tensor)!r} contains NaN or Inf")


def _is_finite(tensor: torch.Tensor) -> bool:
    return math.isfinite(largest(tensor))


def _non_finite_key(module: LoraModule, letter: str, tensor: torch.Tensor) -> str:
    name = module.name
    if module.num_experts:
        name = module.expert_name(next(expert for expert, part in enumerate(tensor) if not _is_finite(part)))
    return f"{name}.lora_{letter}.weight"
