"""What the device is: its streams, events, pinned host buffers, memory and random state.

The only module that asks PyTorch for an accelerator. Its code is the same for every backend (`torch.accelerator`,
`torch.Stream`, `torch.Event`), so CUDA and the emulated accelerator of the tests run the same lines. A *host* device is
CPU memory. A process without an accelerator computes on the CPU alone: `accelerator()` is None, and pinned memory is
ordinary memory. Streams and events exist with an accelerator only.

`hide_accelerators` chooses the CPU in spite of an accelerator. `problem` says why PyTorch can't use a GPU whose driver
is loaded. `is_lost` tells an error after which a device does no more work.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kt_runtime.errors import InvalidValueError

HOST = torch.device("cpu")
CONTROL_FILE = Path("/dev/nvidiactl")  # exists while NVIDIA's driver is loaded
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_CHOICE = "KT_RUNTIME_DEVICE"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# The oldest driver of a CUDA version's minor releases (NVIDIA, CUDA Compatibility).
_LEAST_DRIVERS = {"11": "450", "12": "525", "13": "580"}


@dataclass(frozen=True)
class DeviceMemory:
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class DeviceFacts:
    """`driver`: version of the kernel driver, such as "580.65.06"; "" where it is unknown."""

    name: str
    index: int
    free_bytes: int
    total_bytes: int
    driver: str


def accelerator() -> torch.device | None:
    """The kind of accelerator of this process ("cuda"), without an index. None: it computes on the CPU only."""
    if os.environ.get(_CHOICE) == HOST.type:
        return None
    return torch.accelerator.current_accelerator(check_available=True)


def is_host(where: Tensor | torch.device) -> bool:
    """Whether `where` is CPU memory."""
    device = where.device if isinstance(where, Tensor) else where
    return device.type == HOST.type


def guard(device: torch.device) -> AbstractContextManager[None]:
    """Makes `device` current. Does nothing for the host, or for a device without an index."""
    return nullcontext() if is_host(device) else torch.accelerator.device_index(device.index)


def new_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device=device)


def current_stream(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device)


@contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    """Inside the context work is queued on `stream`, and the stream's device is the current one. A stream may be
    entered again, by any thread."""
    with torch.accelerator.device_index(stream.device_index):
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def recorded(stream: torch.Stream | None = None, device: torch.device | None = None) -> torch.Event:
    """An event after all work queued on `stream`; None: the current stream of `device`, by default the current one."""
    if stream is None:
        stream = torch.accelerator.current_stream(device)
    event = torch.Event(device=stream.device)
    event.record(stream)
    return event


def pinned(num_bytes: int) -> Tensor:
    """New uint8 memory of the host, page-locked if there is an accelerator: its copies then need not wait."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=HOST, pin_memory=accelerator() is not None)


class PinnedBuffer:
    """A growing pinned buffer, and the event after which it may be overwritten. For one thread at a time."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=HOST)
        self._in_use: torch.Event | None = None

    def like(self, tensor: Tensor) -> Tensor:
        """`shaped` for the shape and dtype of `tensor`."""
        return self.shaped(tensor.shape, tensor.dtype)

    def shaped(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor in this buffer, valid until the next call. Waits for the last copy out of the buffer."""
        if self._in_use is not None:
            self._in_use.synchronize()
            self._in_use = None
        wanted = math.prod(shape) * dtype.itemsize
        if self._bytes.numel() < wanted:
            self._bytes = pinned(wanted)
        return self._bytes[:wanted].view(dtype).view(tuple(shape))

    def busy_until(self, event: torch.Event) -> None:
        self._in_use = event


def memory(device: torch.device) -> DeviceMemory:
    """Free memory of an accelerator's `device`, after what all processes use, and its total memory."""
    return DeviceMemory(*torch.accelerator.get_memory_info(device))


def count() -> int:
    """Accelerators that this process may use."""
    return 0 if accelerator() is None else torch.accelerator.device_count()


def facts(index: int) -> DeviceFacts:
    """The facts of one accelerator. On CUDA the call creates a context of this process there, which takes memory."""
    kind = accelerator()
    if kind is None:
        raise InvalidValueError(f"device {index}: this process has no accelerator")
    name = str(getattr(torch.get_device_module(kind), "get_device_name", str)(index))
    found = memory(torch.device(kind.type, index))
    driver = driver_version() if has_cuda() else ""
    return DeviceFacts(name, index, found.free_bytes, found.total_bytes, driver)


def devices() -> list[DeviceFacts]:
    """Every accelerator that this process may use."""
    return [facts(index) for index in range(count())]


def has_cuda() -> bool:
    """Whether the accelerator runs CUDA kernels (Triton's and those of SGLang's libraries)."""
    kind = accelerator()
    return kind is not None and kind.type == "cuda"


def driver_version() -> str:
    """Version of NVIDIA's kernel driver, "" without one. Asks the kernel, which answers where CUDA does not start."""
    try:
        text = _DRIVER_FILE.read_text()
    except OSError:
        return ""
    found = re.search(r"\b[0-9]+\.[0-9]+(\.[0-9]+)?\b", text)
    return found.group() if found else ""


def hide_accelerators() -> None:
    """From now on this process and those that it starts compute on the CPU. To be called before any other use."""
    os.environ[_CHOICE] = HOST.type
    os.environ[_VISIBLE] = ""  # read by the driver, so that SGLang finds no GPU either


def are_hidden() -> bool:
    """Whether the environment hides all accelerators from this process."""
    visible = os.environ.get(_VISIBLE)
    return os.environ.get(_CHOICE) == HOST.type or (visible is not None and visible.strip() in ("", "-1"))


def problem() -> str:
    """Why PyTorch can't use the GPU whose driver is loaded, with what it needs. Empty if PyTorch can use it, if there
    is no such GPU, or if the environment hides it."""
    if not CONTROL_FILE.exists() or are_hidden() or accelerator() is not None:
        return ""
    needed, version = torch.version.cuda, driver_version() or "of unknown version"
    least = _LEAST_DRIVERS.get(str(needed).partition(".")[0])
    needs = f"; CUDA {needed} needs driver {least} or newer" if least else ""
    return (
        f"the NVIDIA driver {version} is loaded, but PyTorch {torch.__version__} can't use a GPU: {_refusal()}{needs}"
    )


def _refusal() -> str:
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return str(error).partition(". ")[0].partition("\n")[0]
    return "the driver lists none"


def is_lost(error: BaseException) -> bool:
    """Whether the device does no more work for this process after `error`: the device is gone, or a kernel has failed.

    Lack of memory is no such error.
    """
    return isinstance(error, torch.AcceleratorError)


def forked_randomness(device: torch.device) -> AbstractContextManager[None]:
    """At its end the context restores the states of the random generators of the host and of `device`."""
    if is_host(device):
        return torch.random.fork_rng(devices=[])
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return torch.random.fork_rng(devices=[index], device_type=device.type)


def is_capturing(device: torch.device) -> bool:
    """Whether a graph is being captured on the current stream of `device`."""
    return not is_host(device) and current_stream(device).is_capturing()
