"""The hash of all weights, computed on background threads: a large model needs a pass over hundreds of gigabytes.

Several threads of low priority hash each tensor and each expert separately; the fingerprint is the hash of these
hashes. SHA-256 releases Python's GIL, so the engine's thread keeps running.

Several ranks give the fingerprint of one process: each hashes its experts, and rank 0 the other weights.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from kt_runtime.experts import ExpertStore
from kt_runtime.experts.packed.weight import PackedWeight
from kt_runtime.experts.store import Each, joined_fingerprint
from kt_runtime.ranks import HashingGroup

logger = logging.getLogger(__name__)

MAX_THREADS = 16
"""One thread hashes 1 to 2 GB/s with SHA instructions; more threads would take memory bandwidth from serving."""
NICENESS = 10
BLOCK_ROWS = 16  # csrc/kernels/layout.h: kBlockRows


def hash_weights(dense: Mapping[str, torch.Tensor], experts: ExpertStore, each: Each = map) -> str:
    """sha256 over the dense tensors' names, types, shapes and bytes, and over the expert store's fingerprint.

    `each`: the built-in `map`, or the `map` of an executor, which distributes the work over its threads.
    """
    names = sorted(dense)
    found = zip(names, each(_digest, [dense[name] for name in names]), strict=True)
    tensors = [(name, dense[name].dtype, tuple(dense[name].shape), digest) for name, digest in found]
    return _joined(tensors, experts.fingerprint(fresh=True, each=each))


@dataclass(frozen=True)
class WeightPart:
    """A rank's part of a dense weight. `shape`: that of the whole. `sizes`: rows of the pieces of each of which the
    rank has an even part; () if it has the whole weight."""

    own: torch.Tensor
    shape: tuple[int, ...]
    sizes: tuple[int, ...] = ()


def hash_weights_of_ranks(
    parts: Mapping[str, WeightPart], experts: ExpertStore, group: HashingGroup, each: Each = map
) -> str:
    """On rank 0 `hash_weights` of one process that has the whole model; empty on the others. All ranks call it.

    `parts`: of the dense weights, `experts`: this rank's. Rank 0 gets the other parts' bytes. Of packed matrices a
    rank's rows must be a multiple of 16, a block; else the hash is another one than that of one process.
    """
    digests = group.gathered(experts.digests(each))
    names = sorted(parts)
    whole = [name for name in names if not parts[name].sizes] if group.is_first else []
    found = dict(zip(whole, each(_digest, [parts[name].own for name in whole]), strict=True))
    for name in names:
        if parts[name].sizes:
            found[name] = group.sha256(*_rows(parts[name], group.share.num_ranks))
    if not group.is_first:
        return ""
    tensors = [(name, parts[name].own.dtype, parts[name].shape, found[name]) for name in names]
    shape, held = experts.shape, experts.shape.num_experts
    in_order = [
        digest
        for first in range(0, len(digests[0]), held)
        for of_rank in digests
        for digest in of_rank[first : first + held]
    ]
    return _joined(tensors, joined_fingerprint(replace(shape, num_experts=held * group.share.num_ranks), in_order))


def _rows(part: WeightPart, num_ranks: int) -> tuple[torch.Tensor, tuple[int, ...], int]:
    """The arguments of `HashingGroup.sha256`."""
    own, rows, of_whole = _content(part.own), len(part.own), part.shape[0]
    if isinstance(part.own, PackedWeight):
        if rows % BLOCK_ROWS:
            return own[:, None], (num_ranks * len(own),), num_ranks * len(own)
        of_whole = BLOCK_ROWS * math.ceil(of_whole / BLOCK_ROWS)
    return own.view(rows, -1), part.sizes, of_whole


def _joined(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...], bytes]], experts: str) -> str:
    """`tensors`: name, type, shape and sha256 of each, by name."""
    digest = hashlib.sha256(b"kt-runtime weights 2")
    for name, dtype, shape, found in tensors:
        digest.update(f"{name}:{dtype}:{shape};".encode() + found)
    digest.update(experts.encode())
    return digest.hexdigest()


def _digest(tensor: torch.Tensor) -> bytes:
    return hashlib.sha256(_content(tensor).numpy().data).digest()


def _content(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, uint8."""
    if isinstance(tensor, PackedWeight):
        return tensor.content()
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)


class WeightsFingerprint:
    """Computes and caches the fingerprint. `compute`: `hash_weights` of a model; `future` calls it. Thread-safe."""

    def __init__(self, compute: Callable[[Each], str], num_threads: int | None = None) -> None:
        if num_threads is None:
            num_threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._compute = compute
        self._lock = threading.Lock()
        self._latest: Future[str] | None = None
        self._closed = False
        self._order = ThreadPoolExecutor(1, "kt-fingerprint", _lower_priority)
        self._threads = ThreadPoolExecutor(num_threads, "kt-hash", _lower_priority)

    def future(self, *, fresh: bool = False) -> Future[str]:
        """The fingerprint, computed once. `fresh`: starts a new computation, which later callers share."""
        with self._lock:
            if self._latest is None or fresh:
                self._latest = self._order.submit(self._run)
            return self._latest

    def close(self) -> None:
        """Cancels the computation: waiting callers get a CancelledError."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._order.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> str:
        began = time.monotonic()
        try:
            found = self._compute(self._threads.map)
        except RuntimeError as error:
            if self._closed:  # a closed executor rejects new work with a RuntimeError
                raise CancelledError from error
            raise
        logger.info("the fingerprint of the weights is %s, computed in %.1f s", found[:16], time.monotonic() - began)
        return found


def _lower_priority() -> None:
    """Lowers this thread's priority (setpriority(2): in Linux each thread has its own niceness)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
