"""SGLang's three operators that copy between device pool and host pool, for a machine whose device is its CPU.

Symbols (SGLang 0.5.23), absent without a GPU: `transfer_kv_direct`, `transfer_kv_per_layer_direct_pf_lf` and
`transfer_kv_all_layer_direct_lf_pf` in `sglang.srt.mem_cache.pool_host.mha` and `.mla`, which call them for
`--hicache-io-backend direct`. Reason: SGLang's kernel library provides them on a GPU, but needs the CUDA driver.

Indices are token rows, in whole pages of consecutive rows. The copies are synchronous and run in the scheduler's
thread, hence page by page with NumPy: 200 MB of bf16 took 65 ms on two cores, as long as one plain copy. torch's
`index_select` and `index_copy_`, which copy element by element, took 700 ms.

Shapes: N tokens, P page size, L layers, R = the remaining dimensions of a token's row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
    if hooks.on_cpu:
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
    pages = list(zip(src_indices[::page_size].tolist(), dst_indices[::page_size].tolist(), strict=True))
    for source, target in zip(map(_rows, src_layers), map(_rows, dst_layers), strict=True):
        for start, end in pages:
            target[end : end + page_size] = source[start : start + page_size]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Host [pages, L, P, R] to one device layer [tokens, R], for K and for V (or for the single MLA latent)."""
    pages = list(zip(src_indices[::page_size].tolist(), dst_indices[::page_size].tolist(), strict=True))
    for source, target in zip(map(_host_pages, src_ptrs), map(_rows, dst_ptrs), strict=True):
        for slot, row in pages:
            target[row : row + page_size] = source[slot // page_size, layer_id]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Device layers [tokens, R], first all of K, then all of V, to host [pages, L, P, R] of K and V."""
    pages = list(zip(src_indices[::page_size].tolist(), dst_indices[::page_size].tolist(), strict=True))
    num_layers = len(src_ptrs) // len(dst_ptrs)
    for part, target in enumerate(map(_host_pages, dst_ptrs)):
        for layer in range(num_layers):
            source = _rows(src_ptrs[part * num_layers + layer])
            for row, slot in pages:
                target[slot // page_size, layer] = source[row : row + page_size]


def _rows(layer: Tensor) -> npt.NDArray[np.uint8]:
    """A byte view [tokens, bytes] of [tokens, R] of any dtype."""
    return layer.view(layer.shape[0], -1).view(torch.uint8).numpy()


def _host_pages(pool: Tensor) -> npt.NDArray[np.uint8]:
    """A byte view [pages, L, P, bytes] of [pages, L, P, R] of any dtype."""
    return pool.view(*pool.shape[:3], -1).view(torch.uint8).numpy()
