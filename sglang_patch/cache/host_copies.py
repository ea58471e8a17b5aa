"""SGLang's three operators that copy between device pool and host pool, where no CUDA kernel runs.

Symbols (SGLang 0.5.23), absent without CUDA: `transfer_kv_direct`, `transfer_kv_per_layer_direct_pf_lf` and
`transfer_kv_all_layer_direct_lf_pf` in `sglang.srt.mem_cache.pool_host.mha` and `.mla`, which call them for
`--hicache-io-backend direct`. Reason: SGLang's kernel library provides them on a GPU, but needs the CUDA driver.

Indices are token rows, in whole pages of consecutive rows. The copies are synchronous and run in the scheduler's
thread, hence page by page; between two pools of CPU memory with NumPy: 200 MB of bf16 took 65 ms on two cores, as long
as one plain copy. torch's `index_select` and `index_copy_`, which copy element by element, took 700 ms.

Shapes: N tokens, P page size, L layers, R = the remaining dimensions of a token's row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kt_runtime import device
from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = tuple(
    f"sglang.srt.mem_cache.pool_host.{module}.{name}"
    for module in ("mha", "mla")
    for name in (
        "transfer_kv_direct",
        "transfer_kv_per_layer_direct_pf_lf",
        "transfer_kv_all_layer_direct_lf_pf",
    )
)


def install(hooks: Hooks) -> None:
    if not hooks.has_cuda_kernels:
        for symbol in SYMBOLS:
            hooks.add(symbol, globals()[symbol.rpartition(".")[2]])


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Layers [tokens, R] to layers [tokens, R]."""
    pages = _pages(src_indices, dst_indices, page_size)
    view = _viewed_by(src_layers, dst_layers)
    for source, target in zip(map(_rows, src_layers), map(_rows, dst_layers), strict=True):
        rows, into = view(source), view(target)
        for start, end in pages:
            into[end : end + page_size] = rows[start : start + page_size]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Host [pages, L, P, R] to one device layer [tokens, R], for K and for V (or for the single MLA latent)."""
    pages = _pages(src_indices, dst_indices, page_size)
    view = _viewed_by(src_ptrs, dst_ptrs)
    for source, target in zip(map(_host_pages, src_ptrs), map(_rows, dst_ptrs), strict=True):
        stored, into = view(source), view(target)
        for slot, row in pages:
            into[row : row + page_size] = stored[slot // page_size, layer_id]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Device layers [tokens, R], first all of K, then all of V, to host [pages, L, P, R] of K and V."""
    pages = _pages(src_indices, dst_indices, page_size)
    view = _viewed_by(src_ptrs, dst_ptrs)
    num_layers = len(src_ptrs) // len(dst_ptrs)
    for part, target in enumerate(map(_host_pages, dst_ptrs)):
        into = view(target)
        for layer in range(num_layers):
            rows = view(_rows(src_ptrs[part * num_layers + layer]))
            for row, slot in pages:
                into[slot // page_size, layer] = rows[row : row + page_size]


def _pages(sources: Tensor, targets: Tensor, page_size: int) -> list[tuple[int, int]]:
    """The first row of each page in the two pools."""
    return list(zip(sources[::page_size].tolist(), targets[::page_size].tolist(), strict=True))


def _viewed_by(*pools: Sequence[Tensor]) -> Callable[[Tensor], Any]:
    """How pages of these pools are copied: as NumPy arrays if all are CPU memory, else as tensors."""
    return Tensor.numpy if all(device.is_host(part) for pool in pools for part in pool) else lambda part: part


def _rows(layer: Tensor) -> Tensor:
    """A byte view [tokens, bytes] of [tokens, R] of any dtype."""
    return layer.view(layer.shape[0], -1).view(torch.uint8)


def _host_pages(pool: Tensor) -> Tensor:
    """A byte view [pages, L, P, bytes] of [pages, L, P, R] of any dtype."""
    return pool.view(*pool.shape[:3], -1).view(torch.uint8)
