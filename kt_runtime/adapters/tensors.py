"""The tensors of one adapter, with one rank and one scaling: what is served, trained, hashed and written.

Names are Hugging Face's without PEFT's prefix. Legend: E experts, R rank.

    dense linear      model.layers.0.self_attn.q_proj         A [R, in]      B [out, R]
    routed experts    model.layers.1.mlp.experts.gate_proj    A [E, R, in]   B [E, out, R]

y = W x + (alpha / rank) B A x. An adapter file has one pair per expert, `...mlp.experts.3.gate_proj`; here the experts
of a layer and projection are stacked into one pair, the form that serving and training compute with.

Fused groups: SGLang computes q, k, v (q_a and kv_a; gate and up) in one linear, and needs LoRA for all or none. With a
missing member, SGLang's code fails with a KeyError, drops tensors, or fills in zeros of a wrong shape. So missing
members are filled in here with A = 0 and B = 0 of the right shapes, which leaves every result unchanged.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from kt_runtime import beside, spare
from kt_runtime.beside import BATCHES, pause, piece
from kt_runtime.families import Family, LoraModule
from kt_runtime.families.base import Config

NUM_THREADS = min(4, os.cpu_count() or 1)
"""Number of threads for work on all tensors of an adapter, for which a client waits."""
PARTS_OF_THREAD = 4
"""Handing an item to a thread takes as long as computing a small one: each takes several at once."""

ALIGNMENT = 64
"""Alignment of tensors in bytes: a cache line."""
LARGE_BYTES = 32 << 20
"""Work on an adapter of at least so many bytes pauses during the engine's batches (`beside.py`). Work on a smaller one
takes less than a decode step."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class LoraPair(NamedTuple):
    """`a` [R, in] and `b` [out, R], each with a leading E for routed experts."""

    a: torch.Tensor
    b: torch.Tensor

    @property
    def is_stacked(self) -> bool:
        return self.a.dim() == 3

    def padded(self, rank: int) -> LoraPair:
        """The same product B A at a higher rank: adds zero rows to `a`, zero columns to `b`."""
        missing = rank - self.a.shape[-2]
        if missing == 0:
            return self
        return LoraPair(
            torch.nn.functional.pad(self.a, (0, 0, 0, missing)), torch.nn.functional.pad(self.b, (0, missing))
        )

    def scaled(self, factor: float) -> LoraPair:
        """B A times `factor`: multiplies `b` in float32; returns the pair itself when `factor` is exactly 1."""
        return self if factor == 1.0 else LoraPair(self.a, self.b.to(torch.float32) * factor)


@dataclass(frozen=True)
class AdapterTensors:
    """`modules` by name, see the module's docstring. `notes`: changes made when it was read, for users.

    The tensors are not copied: changing them in place changes the adapter.
    """

    rank: int
    alpha: float
    modules: Mapping[str, LoraPair]
    notes: tuple[str, ...] = ()

    @classmethod
    def from_modules(
        cls,
        rank: int,
        alpha: float,
        modules: Mapping[str, LoraPair | tuple[torch.Tensor, torch.Tensor]],
        notes: tuple[str, ...] = (),
    ) -> AdapterTensors:
        """An adapter of (A, B) pairs, routed experts stacked. Checks nothing: `check_adapter` does."""
        return cls(rank, alpha, {name: LoraPair(*pair) for name, pair in modules.items()}, notes)

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors with one entry per expert, as `NAME.lora_A.weight` and `NAME.lora_B.weight`. Views, no copies."""
        flat: dict[str, torch.Tensor] = {}
        for name, pair in self.modules.items():
            if not pair.is_stacked:
                flat[f"{name}.lora_A.weight"], flat[f"{name}.lora_B.weight"] = pair
                continue
            parent, _, projection = name.rpartition(".")
            for expert, (a, b) in enumerate(zip(pair.a.unbind(0), pair.b.unbind(0), strict=True)):
                flat[f"{parent}.{expert}.{projection}.lora_A.weight"] = a
                flat[f"{parent}.{expert}.{projection}.lora_B.weight"] = b
        return flat

    @property
    def targets(self) -> list[str]:
        """The distinct projections that are adapted somewhere, sorted: PEFT's `target_modules`."""
        return sorted({name.rpartition(".")[2] for name in self.modules})

    def in_one_dtype(self) -> AdapterTensors:
        """The same numbers in one dtype: float32 if the tensors' dtypes differ, otherwise the adapter itself."""
        if len({tensor.dtype for pair in self.modules.values() for tensor in pair}) == 1:
            return self
        pairs = {name: LoraPair(pair.a.float(), pair.b.float()) for name, pair in self.modules.items()}
        return replace(self, modules=pairs)

    @property
    def num_bytes(self) -> int:
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.modules.values())


class TensorContent(NamedTuple):
    """`digest`: SHA-256 of the tensor's bytes in row-major order, little-endian. `largest`: its largest absolute value,
    NaN or infinity if an element is.
    """

    digest: bytes
    largest: float


Contents = Mapping[str, TensorContent]
"""The contents of an adapter's tensors, by `NAME.lora_A` and `NAME.lora_B`; routed experts are stacked."""


def measured(tensor: torch.Tensor) -> TensorContent:
    """The content of a tensor. Works in pieces, each read twice while it is in a core's cache. Holds the GIL for
    microseconds only."""
    digest, greatest = hashlib.sha256(), 0.0
    for part in pieces(tensor):
        digest.update(part.view(torch.uint8).numpy().data)
        greatest = _larger(greatest, part)
    return TensorContent(digest.digest(), greatest)


def largest(tensor: torch.Tensor) -> float:
    """The largest absolute value, as in `TensorContent.largest`."""
    greatest = 0.0
    for part in pieces(tensor):
        greatest = _larger(greatest, part)
    return greatest


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """All elements in row-major order on the CPU, flat, in pieces: a background thread pauses before each of them."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    for part in flat.split(piece(flat.numel(), flat.nbytes)) if flat.numel() else ():
        pause()
        yield part


def copy_in_pieces(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target.copy_(source)` in pieces of the first dimension: a background thread pauses before each of them. Needs at
    least one dimension."""
    at_once = piece(len(target), max(target.nbytes, source.nbytes))
    for first in range(0, len(target), at_once):
        pause()
        target[first : first + at_once].copy_(source[first : first + at_once])


_BITS: dict[int, tuple[type[np.generic], type[np.generic], torch.dtype]] = {
    2: (np.int16, np.uint16, torch.int16),
    4: (np.int32, np.uint32, torch.int32),
    8: (np.int64, np.uint64, torch.int64),
}


def _larger(greatest: float, part: torch.Tensor) -> float:
    """The larger of `greatest` and the largest absolute value of `part`, a contiguous tensor; NaN if one of them is.

    The bits of IEEE 754's numbers, read as integers, are in the order of the absolute values, infinity and then NaN at
    the end: as signed integers those of numbers without a sign, as unsigned ones those with it. These maxima take a
    fifth of the time of `torch.aminmax`, which is slow for bfloat16.
    """
    signed, unsigned, kind = _BITS[part.itemsize]
    bits = part.view(kind).numpy()
    most, least = int(bits.view(signed).max()), int(bits.view(unsigned).max())
    sign = 1 << (8 * part.itemsize - 1)
    found = float(torch.tensor(max(most, least - sign, 0), dtype=kind).view(part.dtype))
    return found if greatest == greatest and not found <= greatest else greatest


def contents_of(adapter: AdapterTensors, known: Contents | None = None) -> dict[str, TensorContent]:
    """The contents of every tensor, on several threads. `known`: those that the caller has measured already."""
    found = dict(known or {})
    tensors = {}
    for name, pair in adapter.modules.items():
        tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"] = pair
    missing = [key for key in tensors if key not in found]
    found |= zip(missing, on_threads(measured, [tensors[key] for key in missing], adapter.num_bytes), strict=True)
    return {key: found[key] for key in tensors}


def allocated(shapes: Mapping[_Item, torch.Size], dtype: torch.dtype) -> dict[_Item, torch.Tensor]:
    """Tensors of these shapes with arbitrary contents, in one piece of memory, which is free with the last of them
    (`spare.py`)."""
    units = {name: -(-shape.numel() * dtype.itemsize // ALIGNMENT) for name, shape in shapes.items()}
    num_bytes = ALIGNMENT * sum(units.values())
    if not num_bytes:
        return {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    pieces = torch.from_numpy(spare.array(num_bytes)).split([ALIGNMENT * each for each in units.values()])
    return {
        name: piece[: shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
    }


def thread_pool(name: str, num_bytes: int = 0) -> ThreadPoolExecutor:
    """Threads whose tensor operations don't start further threads, for work on `num_bytes`. They pause during the
    engine's batches if this thread does, or if the work is large."""
    pauses = BATCHES.gives_way()

    def begin() -> None:
        without_openmp()
        give_way(num_bytes)
        if pauses:
            BATCHES.give_way()

    return ThreadPoolExecutor(NUM_THREADS, name, begin)


def on_threads(function: Callable[[_Item], _Result], items: Sequence[_Item], num_bytes: int = 0) -> list[_Result]:
    """The function's results, in order, for work on `num_bytes` in all. Raises the first error, after the items that
    are being computed."""
    if not items:
        return []
    each = -(-len(items) // (PARTS_OF_THREAD * NUM_THREADS))
    parts = [items[first : first + each] for first in range(0, len(items), each)]
    with thread_pool("kt-adapter", num_bytes) as threads:
        results = threads.map(lambda part: [function(item) for item in part], parts)
        return [result for part in results for result in part]


def without_openmp() -> None:
    """From now on, PyTorch's operations on this thread's tensors run on this thread alone.

    While other threads keep the cores busy, OpenMP's threads wait for each other at the end of each operation, for as
    long as the system lets those other threads run. `torch.set_num_threads` would hold for other threads, too.
    """
    torch.get_num_threads()  # PyTorch sets the number itself when a thread asks first
    try:
        library = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD)
    except OSError:  # another OpenMP, or none
        return
    library.omp_set_num_threads(1)


def give_way(num_bytes: int = LARGE_BYTES) -> None:
    """As `beside.give_way`, if the work is on at least `LARGE_BYTES`."""
    if num_bytes >= LARGE_BYTES:
        beside.give_way()


def zero_pair(module: LoraModule, rank: int, dtype: torch.dtype = torch.float32) -> LoraPair:
    """A pair of zeros, which changes nothing, in the shapes for `module`."""
    stack = (module.num_experts,) if module.num_experts else ()
    return LoraPair(
        torch.zeros(*stack, rank, module.in_features, dtype=dtype),
        torch.zeros(*stack, module.out_features, rank, dtype=dtype),
    )


def expected_shapes(module: LoraModule, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of A and B in an AdapterTensors."""
    stack = (module.num_experts,) if module.num_experts else ()
    return (*stack, rank, module.in_features), (*stack, module.out_features, rank)


def missing_members(adapter: AdapterTensors, family: Family, config: Config) -> list[LoraModule]:
    """The modules that `adapter` lacks although it adapts others of the same SGLang linear, in the model's order."""
    modules = family.lora_modules(config)
    touched = {module.source for module in modules if module.name in adapter.modules}
    return [module for module in modules if module.source in touched and module.name not in adapter.modules]


def complete_groups(adapter: AdapterTensors, family: Family, config: Config) -> AdapterTensors:
    """`adapter` with every group complete and its modules in the model's order; the same object if nothing changes."""
    missing = missing_members(adapter, family, config)
    order = [module.name for module in family.lora_modules(config)]
    names = adapter.modules.keys() | {module.name for module in missing}
    ordered = [name for name in order if name in names] + [name for name in adapter.modules if name not in set(order)]
    if not missing and ordered == list(adapter.modules):
        return adapter
    dtype = next(iter(adapter.modules.values())).a.dtype
    fillers = {module.name: zero_pair(module, adapter.rank, dtype) for module in missing}
    return replace(adapter, modules={name: _pick(name, adapter, fillers) for name in ordered})


def without_fillers(adapter: AdapterTensors) -> AdapterTensors:
    """`adapter` without the pairs whose A and B are all zero: such pairs get no gradient, so they can't be trained.

    No trained or fresh pair is among them: LoRA starts with B = 0 and a random A.
    """
    return replace(adapter, modules={name: pair for name, pair in adapter.modules.items() if _is_used(pair)})


def _pick(name: str, adapter: AdapterTensors, fillers: dict[str, LoraPair]) -> LoraPair:
    return fillers[name] if name in fillers else adapter.modules[name]


def _is_used(pair: LoraPair) -> bool:
    return bool(pair.a.any()) or bool(pair.b.any())
