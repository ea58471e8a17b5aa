"""What publishing needs to know of a session's masters, measured beside the optimizer step instead of after it.

A version's hash takes longer than everything else about publishing: SHA-256 reads one or two GB a second on one core.
In a session that publishes, threads therefore measure each master as soon as the optimizer has changed it, while the
optimizer goes on with the others and while the client prepares its next request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from kt_runtime import device
from kt_runtime.adapters.tensors import TensorContent, measured, thread_pool


class MasterContents:
    """Of `parameters`, which are named as in `kt_runtime.adapters.tensors.Contents`. Nothing is measured before `keep`.

    Only `known` may be called by another thread than the engine's, and only while no master changes.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self._threads: ThreadPoolExecutor | None = None
        self._current: dict[str, Future[TensorContent]] = {}

    def keep(self) -> None:
        """From now on, masters are measured as they change; on an accelerator never, since they have to be copied."""
        if self._threads is None and all(device.is_host(each.device) for each in self._parameters.values()):
            self._threads = thread_pool("kt-masters")

    def changed(self, names: Iterable[str]) -> None:
        """These masters have new values. What was measured of the earlier ones, or is being measured, is dropped."""
        for name in names:
            earlier = self._current.pop(name, None)
            if earlier is not None:
                earlier.cancel()
            if self._threads is not None:
                self._current[name] = self._threads.submit(measured, self._parameters[name])

    def known(self) -> dict[str, TensorContent]:
        """Waits for the measurements under way. Masters that have not changed since `keep` are missing."""
        return {name: future.result() for name, future in list(self._current.items())}

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        self._current.clear()
