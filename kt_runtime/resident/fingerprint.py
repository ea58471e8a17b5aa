"""The hash of all weights, computed beside the engine: for a large model it takes a pass over hundreds of gigabytes.

Every tensor and every expert is hashed on its own, by several threads that leave the processors to others where these
want them, and the hashes are hashed. SHA-256 runs without Python's lock, so that the engine's thread goes on meanwhile.
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
from kt_runtime.experts.store import Each

logger = logging.getLogger(__name__)

MAX_THREADS = 16
"""One thread hashes 1 to 2 GB/s where the processor knows SHA-256; more would take the memory from everybody else."""
NICENESS = 10


def hash_weights(dense: Mapping[str, torch.Tensor], experts: ExpertStore, each: Each = map) -> str:
    """sha256 over the dense tensors' names, types, shapes and bytes, and over the expert store's fingerprint.

    `each` is the built-in `map`, or that of an executor whose threads are to do the work.
    """
    digest = hashlib.sha256(b"kt-runtime weights 2")
    names = sorted(dense)
    for name, found in zip(names, each(_digest, [dense[name] for name in names]), strict=True):
        tensor = dense[name]
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode() + found)
    digest.update(experts.fingerprint(fresh=True, each=each).encode())
    return digest.hexdigest()


def _digest(tensor: torch.Tensor) -> bytes:
    return hashlib.sha256(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data).digest()


class WeightsFingerprint:
    """`compute` is `hash_weights` of some model. Computes nothing until it is asked; may be asked by any thread."""

    def __init__(self, compute: Callable[[Each], str], num_threads: int | None = None) -> None:
        if num_threads is None:
            num_threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._compute = compute
        self._lock = threading.Lock()
        self._latest: Future[str] | None = None
        self._closed = False
        self._order = ThreadPoolExecutor(1, "kt-fingerprint")
        self._threads = ThreadPoolExecutor(num_threads, "kt-hash", _give_way)

    def future(self, *, fresh: bool = False) -> Future[str]:
        """The fingerprint, computed once; `fresh`: computed anew from now on, for those too who ask later."""
        with self._lock:
            if self._latest is None or fresh:
                self._latest = self._order.submit(self._run)
            return self._latest

    def close(self) -> None:
        """Whoever waits gets a CancelledError."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._order.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> str:
        began = time.monotonic()
        try:
            found = self._compute(self._threads.map)
        except RuntimeError as error:
            if self._closed:  # no work for closed threads
                raise CancelledError from error
            raise
        logger.info("the fingerprint of the weights is %s, computed in %.1f s", found[:16], time.monotonic() - began)
        return found


def _give_way() -> None:
    """This thread gets the processors that others leave it (setpriority(2): in Linux a thread has its own niceness)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
