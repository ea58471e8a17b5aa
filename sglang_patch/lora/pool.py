"""Copies an `InstalledAdapter` into a slot of SGLang's LoRA memory pool, and places the pool's expert buffers.

Symbols (SGLang 0.5.23): `LoRAMemoryPool.load_lora_weight_to_buffer` and `.init_buffers`. Reasons: SGLang copies routed
experts one by one, which takes seconds for a large model and blocks every stream. An `InstalledAdapter` needs two
copies for each part of a fused linear. Without CUDA kernels, the base model's slot is not cleared either, because
nothing reads a slot of rank 0. With an accelerator, the buffers of routed experts are allocated in host memory, where
the expert store reads them.

On a CPU the buffers are mapped, and the system commits a page when an adapter is first written to it: a slot takes the
memory that its adapters need, not that of the highest rank. `release_parts` gives a slot's pages back.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from kt_runtime.beside import piece
from kt_runtime.errors import AdapterError
from kt_runtime.mapped import commit, give_piece_back, mapped, pieces_between
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.lora.adapter import FusedLora, InstalledAdapter

POOL = "sglang.srt.lora.mem_pool.LoRAMemoryPool"
SYMBOLS = (f"{POOL}.load_lora_weight_to_buffer", f"{POOL}.init_buffers")


def install(hooks: Hooks) -> None:
    hooks.around(SYMBOLS[0], load_clearing_base if hooks.has_cuda_kernels else load_adapters_only)
    hooks.around(SYMBOLS[1], init_mapped if hooks.on_cpu else init_with_experts_on_host)


def load_adapters_only(
    original: Callable[..., None], pool: Any, uid: str | None, buffer_id: int, lora_adapter: Any, *args: Any
) -> None:
    if lora_adapter is not None:
        load_clearing_base(original, pool, uid, buffer_id, lora_adapter, *args)


def load_clearing_base(
    original: Callable[..., None], pool: Any, uid: str | None, buffer_id: int, lora_adapter: Any, *args: Any
) -> None:
    if isinstance(lora_adapter, InstalledAdapter):
        fill_slot(pool, buffer_id, lora_adapter)
    else:
        original(pool, uid, buffer_id, lora_adapter, *args)


def fill_slot(pool: Any, slot: int, adapter: InstalledAdapter) -> None:
    """Copies `adapter` into `slot` and zeroes all modules that the adapter does not change.

    If the adapter changes no experts, expert buffers keep their old content: the expert layer skips such an adapter.
    """
    for copy in copies_into(pool, slot, adapter):
        copy()
    note_written(pool, slot, adapter)


def copies_into(pool: Any, slot: int, adapter: InstalledAdapter) -> list[Callable[[], None]]:
    """The parts of `fill_slot`, in any order or at once: a fused linear of a layer each, or some of its experts."""
    buffers = [
        (name, layer, a[slot], b[slot], experts)
        for name in pool.A_buffer
        for layer, (a, b) in enumerate(zip(pool.A_buffer[name], pool.B_buffer[name], strict=True))
        if a[slot].dim() == 2 or (name, layer) in adapter.weights or adapter.adapts_experts
        for experts in _parts(a[slot], b[slot])
    ]

    def copy(name: str, layer: int, a: torch.Tensor, b: torch.Tensor, experts: slice) -> None:
        weight = adapter.weights.get((name, layer))
        if weight is None:
            a[experts].zero_()
            b[experts].zero_()
        else:
            _commit(a[experts], b[experts], adapter.config.r, pool.max_lora_rank)
            _fill(a[experts], b[experts], weight, adapter.config.r, pool.max_lora_rank, experts)

    others = (pool.embedding_A_buffer, pool.embedding_B_buffer, pool.lm_head_A_buffer, pool.lm_head_B_buffer)
    zeroed = [buffer[slot].zero_ for each in others for buffer in each.values()]
    return [*(partial(copy, *each) for each in buffers), *zeroed]


def _parts(a: torch.Tensor, b: torch.Tensor) -> list[slice]:
    """Slices of the experts, each of which takes a millisecond to copy. A dense linear is one slice."""
    if a.dim() == 2:
        return [slice(None)]
    each = piece(len(a), a.nbytes + b.nbytes)
    return [slice(first, first + each) for first in range(0, len(a), each)]


def _commit(a: torch.Tensor, b: torch.Tensor, rank: int, max_rank: int) -> None:
    """All pages of `b` are going to be written; those of `a`, if the adapter has the highest rank."""
    for buffer in (a, b) if rank == max_rank else (b,):
        if buffer.device.type == "cpu":
            commit(buffer.data_ptr(), buffer.nbytes)


def _fill(a: torch.Tensor, b: torch.Tensor, weight: FusedLora, rank: int, max_rank: int, experts: slice) -> None:
    """Parts of A are contiguous for dense linears; for experts, each part starts at a multiple of `max_rank`."""
    distance, row = rank if a.dim() == 2 else max_rank, 0
    for number, (num_rows, pair) in enumerate(weight):
        target_a = a[..., number * distance : number * distance + rank, :]
        target_b = b[..., row : row + num_rows, :rank]
        row += num_rows
        if pair is None:
            target_a.zero_()
            target_b.zero_()
        else:
            target_a.copy_(pair.a[experts])
            target_b.copy_(pair.b[experts])
    if row != b.shape[-2]:
        raise AdapterError(f"an adapter's linear has {row} outputs, the one of the server {b.shape[-2]}")


def slot_bytes(pool: Any, adapter: InstalledAdapter) -> int:
    """Bytes of the pool that the adapter occupies in a slot. B has the server's highest rank, A the adapter's own."""
    buffers = [(pool.A_buffer[name][layer][0], pool.B_buffer[name][layer][0]) for name, layer in list(adapter.weights)]
    return sum(a.nbytes * adapter.config.r // pool.max_lora_rank + b.nbytes for a, b in buffers)


def note_written(pool: Any, slot: int, adapter: InstalledAdapter) -> None:
    """The slot is of `adapter`, which was copied into it or is going to be."""
    written, needed = _counts(pool, "kt_written"), slot_bytes(pool, adapter)
    written[slot] = max(written.get(slot, 0), needed)
    _counts(pool, "kt_needed")[slot] = needed


def note_empty(pool: Any, slot: int, left_bytes: int = 0) -> None:
    """The slot is of no adapter; its memory stays committed. `left_bytes`: of pages that were to be given back, and
    are not."""
    _counts(pool, "kt_needed").pop(slot, None)
    if left_bytes > 0:
        _counts(pool, "kt_written")[slot] = left_bytes


def written_bytes(pool: Any, slot: int) -> int:
    """Committed memory of the slot, approximately."""
    return _counts(pool, "kt_written").get(slot, 0)


def spare_bytes(pool: Any) -> int:
    """The memory of all slots that is committed and that their adapters don't need."""
    needed = _counts(pool, "kt_needed")
    return sum(max(0, num_bytes - needed.get(slot, 0)) for slot, num_bytes in list(_counts(pool, "kt_written").items()))


def release_parts(pool: Any, slot: int) -> list[Callable[[], None]]:
    """Calls that give the pages of a slot's mapped buffers back, a piece each; the slot's contents are lost.

    Each must have ended, or never begin, before an adapter is copied into the slot.
    """
    _counts(pool, "kt_written").pop(slot, None)
    parts: list[Callable[[], None]] = []
    for buffers in (*pool.A_buffer.values(), *pool.B_buffer.values()):
        for buffer in buffers:
            memory = getattr(pool, "kt_mapped", {}).get(buffer.data_ptr())
            if memory is not None:
                pieces = pieces_between(slot * buffer[0].nbytes, (slot + 1) * buffer[0].nbytes)
                parts += [partial(give_piece_back, memory, *piece) for piece in pieces]
    return parts


def _counts(pool: Any, name: str) -> dict[int, int]:
    """Bytes by slot."""
    found: dict[int, int] | None = getattr(pool, name, None)
    if found is None:
        found = {}
        setattr(pool, name, found)
    return found


def init_mapped(original: Callable[..., None], pool: Any, base_model: Any) -> None:
    """SGLang's `init_buffers`, with buffers whose pages are committed when they are first written."""
    mapping = MappedZeros()
    with mapping:
        original(pool, base_model)
    pool.kt_mapped = mapping.memory


class MappedZeros(TorchFunctionMode):
    """In this context `torch.zeros` of three or four dimensions returns mapped memory. `memory`: by address."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[int, mmap.mmap] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        shape = args[0] if func is torch.zeros and len(args) == 1 and isinstance(args[0], tuple) else ()
        if len(shape) not in (3, 4) or set(given) != {"dtype", "device"} or not torch.Size(shape).numel():
            return func(*args, **given)
        num_bytes = torch.Size(shape).numel() * given["dtype"].itemsize
        memory = mapped(num_bytes)
        tensor = torch.from_numpy(np.frombuffer(memory, np.uint8)).view(given["dtype"]).view(shape)
        self.memory[tensor.data_ptr()] = memory
        return tensor


def init_with_experts_on_host(original: Callable[..., None], pool: Any, base_model: Any) -> None:
    """SGLang's `init_buffers`, with the four-dimensional buffers in host memory if the store computes the experts."""
    if any(hasattr(module, "experts_forward") for module in base_model.modules()):
        with ExpertBuffersOnHost():
            original(pool, base_model)
    else:
        original(pool, base_model)


class ExpertBuffersOnHost(TorchFunctionMode):
    """In this context `torch.zeros` of four dimensions allocates on the CPU, whatever device the caller requests."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.zeros and args and isinstance(args[0], tuple) and len(args[0]) == 4:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)
