"""Copies of a session's masters for the next published version, made during the optimizer step instead of after it.

Copying and hashing take longer than everything else about publishing: SHA-256 reads one or two GB a second on one core.
In a session that publishes, threads therefore copy and measure each master as soon as the optimizer has changed it,
while the optimizer updates the others and while the client prepares its next request.

They do so in the steps after which a publication is expected: if n steps lay between the last two publications, in
every n-th step. Other steps, and sessions that never publish, have no extra cost. A publication that was not expected
makes its own copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import torch

from kt_runtime.adapters.tensors import TensorContent, allocated, copy_in_pieces, measured


class MasterCopies:
    """Copies of `parameters`, which are named as in `kt_runtime.adapters.tensors.Contents`.

    `threads` run the copies; None: the masters are on an accelerator, where only publications copy.
    Only `take` may be called by another thread than the engine's, and only while no master changes.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], threads: ThreadPoolExecutor | None) -> None:
        self._parameters, self._threads = parameters, threads
        self._steps_between: int | None = None
        self._num_steps = 0
        self._buffers: dict[str, torch.Tensor] = {}
        self._ahead: dict[str, Future[TensorContent]] = {}
        self._contents: dict[str, TensorContent] = {}

    def publishing(self) -> None:
        """A publication begins. The next one is expected after as many steps as lie between this one and the last."""
        self._steps_between, self._num_steps = self._num_steps or self._steps_between or 1, 0

    def step_begins(self) -> None:
        """Called before an optimizer step. Frees copies that were not taken, or reuses their memory."""
        self._num_steps += 1
        is_expected = self._steps_between is not None and self._num_steps % self._steps_between == 0
        if not is_expected or not all(future.done() for future in self._ahead.values()):
            self._free()
        if is_expected and self._threads is not None and not self._buffers and self._has_memory():
            self._buffers = allocated({name: value.shape for name, value in self._parameters.items()}, torch.float32)

    def stepped(self, names: Iterable[str]) -> None:
        """The optimizer step that has begun has changed these masters."""
        for name in names:
            self._contents.pop(name, None)
            self._ahead.pop(name, None)
            if self._threads is not None and self._buffers:
                self._ahead[name] = self._threads.submit(self._copied, name, self._buffers[name])

    def replaced(self, names: Iterable[str]) -> None:
        """These masters were replaced by loaded ones."""
        self._free()
        for name in names:
            self._contents.pop(name, None)

    def take(self) -> tuple[dict[str, torch.Tensor], dict[str, TensorContent]]:
        """Copies of all masters in float32 on the CPU, which belong to the caller, and what is known of them.

        The contents are complete if the masters are in host memory, and empty on an accelerator. Waits for running
        copies.

        On an accelerator the calling thread copies: its stream follows the engine's, those of other threads would not
        wait for the optimizer.
        """
        if self._threads is None:
            return {
                name: each.detach().to("cpu", torch.float32, copy=True) for name, each in self._parameters.items()
            }, {}
        self._contents |= {name: future.result() for name, future in self._ahead.items()}
        copies = {name: self._buffers[name] for name in self._ahead}
        missing = [name for name in self._parameters if name not in copies]
        buffers = allocated({name: self._parameters[name].shape for name in missing}, torch.float32)
        found = self._threads.map(lambda name: self._copied(name, buffers[name]), missing)
        self._contents |= zip(missing, found, strict=True)
        self._ahead, self._buffers = {}, {}
        return copies | buffers, dict(self._contents)

    def close(self) -> None:
        self._free()
        self._contents = {}

    def _copied(self, name: str, target: torch.Tensor) -> TensorContent:
        copy_in_pieces(target, self._parameters[name].detach())
        return self._contents.get(name) or measured(target)

    def _free(self) -> None:
        """Drops all copies. Running ones are still written to their buffers, which nobody reads."""
        for future in self._ahead.values():
            future.cancel()
        self._ahead, self._buffers = {}, {}

    def _has_memory(self) -> bool:
        """Whether memory suffices for copies of all masters. If not, the publication reports it."""
        return psutil.virtual_memory().available > sum(4 * each.numel() for each in self._parameters.values())
