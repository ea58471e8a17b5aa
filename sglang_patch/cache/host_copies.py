"""SGLang's three operators that copy between device pool and host pool, where no CUDA kernel runs.

Symbols (SGLang 0.5.23), absent without CUDA: `transfer_kv_direct`, `transfer_kv_per_layer_direct_pf_lf` and
`transfer_kv_all_layer_direct_lf_pf` in `sglang.srt.mem_cache.pool_host.mha`, `.mla` and `.mamba` (linear attention's
states, a page of one "token" each), which call them for `--hicache-io-backend direct`. Reason: SGLang's kernel library
provides them on a GPU, but needs the CUDA driver.

Indices are token rows, in whole pages of consecutive rows. The copies are synchronous and run in the scheduler's
thread, hence as few of them as possible: pages that follow each other in both pools are one. Between two pools of CPU
memory with NumPy: 200 MB of bf16 took 65 ms on two cores, as long as one plain copy. torch's `index_select` and
`index_copy_`, which copy element by element, took 700 ms.

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
    for module in ("mha", "mla", "mamba")
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
    runs = _runs(src_indices, dst_indices, page_size)
    view = _viewed_by(src_layers, dst_layers)
    for source, target in zip(map(_rows, src_layers), map(_rows, dst_layers), strict=True):
        rows, into = view(source), view(target)
        for start, end, count in runs:
            into[end : end + count] = rows[start : start + count]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Host [pages, L, P, R] to one device layer [tokens, R], for K and for V (or for the single MLA latent)."""
    runs = _runs(src_indices, dst_indices, page_size)
    view = _viewed_by(src_ptrs, dst_ptrs)
    for source, target in zip(map(_host_pages, src_ptrs), map(_paged(page_size), dst_ptrs), strict=True):
        stored, into = view(source), view(target)
        for slot, row, count in runs:
            first, from_, pages = row // page_size, slot // page_size, count // page_size
            into[first : first + pages] = stored[from_ : from_ + pages, layer_id]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Device layers [tokens, R], first all of K, then all of V, to host [pages, L, P, R] of K and V."""
    runs = _runs(src_indices, dst_indices, page_size)
    view = _viewed_by(src_ptrs, dst_ptrs)
    num_layers = len(src_ptrs) // len(dst_ptrs)
    for part, target in enumerate(map(_host_pages, dst_ptrs)):
        into = view(target)
        for layer in range(num_layers):
            paged = view(_paged(page_size)(src_ptrs[part * num_layers + layer]))
            for row, slot, count in runs:
                first, to, pages = row // page_size, slot // page_size, count // page_size
                into[to : to + pages, layer] = paged[first : first + pages]


def _runs(sources: Tensor, targets: Tensor, page_size: int) -> list[tuple[int, int, int]]:
    """(first row in the one pool, in the other, number of rows) of pages that follow each other in both."""
    runs: list[tuple[int, int, int]] = []
    for source, target in zip(sources[::page_size].tolist(), targets[::page_size].tolist(), strict=True):
        if runs and (source, target) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + page_size)
        else:
            runs.append((source, target, page_size))
    return runs


def _viewed_by(*pools: Sequence[Tensor]) -> Callable[[Tensor], Any]:
    """How pages of these pools are copied: as NumPy arrays if all are CPU memory, else as tensors."""
    return Tensor.numpy if all(device.is_host(part) for pool in pools for part in pool) else lambda part: part


def _rows(layer: Tensor) -> Tensor:
    """A byte view [tokens, bytes] of [tokens, R] of any dtype."""
    return layer.view(layer.shape[0], -1).view(torch.uint8)


def _paged(page_size: int) -> Callable[[Tensor], Tensor]:
    """The function from a layer [tokens, R] of any dtype to a byte view [pages, P, bytes] of its whole pages."""

    def paged(layer: Tensor) -> Tensor:
        rows = _rows(layer)
        pages = rows.shape[0] // page_size
        return rows[: pages * page_size].view(pages, page_size, -1)

    return paged


def _host_pages(pool: Tensor) -> Tensor:
    """A byte view [pages, L, P, bytes] of [pages, L, P, R] of any dtype."""
    return pool.view(*pool.shape[:3], -1).view(torch.uint8)
