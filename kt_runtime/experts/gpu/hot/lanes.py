"""A queue of work other than the current stream: a stream of the device; on the host, work is done at once."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from kt_runtime import device as devices


class Mark(Protocol):
    """A place in a queue. `torch.Event` on a device."""

    def query(self) -> bool:
        """Whether all work before the mark has ended."""
        ...

    def synchronize(self) -> None:
        """Waits until all work before the mark has ended."""
        ...


class _Done:
    """A mark after work that is done at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class Lane:
    """`device`: an accelerator's device, or the host's, where every method is trivial."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if devices.is_host(device) else devices.new_stream(device)

    def on(self) -> AbstractContextManager[None]:
        """Work queued inside goes to this lane."""
        return nullcontext() if self._stream is None else devices.on(self._stream)

    def mark(self) -> Mark:
        """The end of the work that is queued in this lane."""
        return _Done() if self._stream is None else devices.recorded(self._stream)

    def follows(self, mark: Mark) -> None:
        """What is queued in this lane from now on starts after `mark`. The host does not wait."""
        if self._stream is not None:
            assert isinstance(mark, torch.Event)
            self._stream.wait_event(mark)

    def follows_current(self) -> None:
        """What is queued in this lane from now on starts after what is queued on the current stream."""
        if self._stream is not None:
            self._stream.wait_event(devices.recorded(device=self._device))

    def precedes_current(self) -> None:
        """What is queued on the current stream from now on starts after what is queued in this lane."""
        if self._stream is not None:
            devices.current_stream(self._device).wait_event(devices.recorded(self._stream))
