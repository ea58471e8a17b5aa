"""The hash of all weights, computed on background threads: a large model needs a pass over hundreds of gigabytes.

Several threads of low priority hash each tensor and each expert separately; the fingerprint is the hash of these
hashes. SHA-256 releases Python's GIL, so the engine's thread keeps running.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import torch

from kt_runtime.experts import ExpertStore
from kt_runtime.experts.packed.weight import PackedWeight
from kt_runtime.experts.store import Each

logger = logging.getLogger(__name__)

MAX_THREADS = 16
"""One thread hashes 1 to 2 GB/s with SHA instructions; more threads would take memory bandwidth from serving."""
NICENESS = 10


def hash_weights(dense: Mapping[str, torch.Tensor], experts: ExpertStore, each: Each = map) -> str:
    """sha256 over the dense tensors' names, types, shapes and bytes, and over the expert store's fingerprint.

    `each`: the built-in `map`, or the `map` of an executor, which distributes the work over its threads.
    """
    digest = hashlib.sha256(b"kt-runtime weights 2")
    names = sorted(dense)
    for name, found in zip(names, each(_digest, [dense[name] for name in names]), strict=True):
        tensor = dense[name]
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode() + found)
    digest.update(experts.fingerprint(fresh=True, each=each).encode())
    return digest.hexdigest()


def _digest(tensor: torch.Tensor) -> bytes:
    if isinstance(tensor, PackedWeight):
        return hashlib.sha256(tensor.content().numpy().data).digest()
    return hashlib.sha256(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data).digest()


class WeightsFingerprint:
    """Computes and caches the fingerprint. `compute`: `hash_weights` of a model; `future` calls it. Thread-safe."""

    def __init__(self, compute: Callable[[Each], str], num_threads: int | None = None) -> None:
        if num_threads is None:
            num_threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._compute = compute
        self._lock = threading.Lock()
        self._latest: Future[str] | None = None
        self._closed = False
        self._order = ThreadPoolExecutor(1, "kt-fingerprint")
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
