"""torch.late: the emulated device as a module of PyTorch, as torch.cuda is one, and what its tests control.

`enable()` makes the device the accelerator of this process until its end.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from device.library import built_library
from torch import Tensor

NAME = "late"
_Device = torch.device | str | int | None


def enable() -> torch.device:
    """Registers the device in this process, at the first call. Returns it."""
    if not hasattr(torch, NAME):
        torch.utils.rename_privateuse1_backend(NAME)
        torch.ops.load_library(str(built_library()))
        torch._register_device_module(NAME, _module())
        torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=[])
        follow_environment()
    return torch.device(NAME, 0)


def follow_environment() -> None:
    """For processes that no test controls: the environment says when work runs, `LATE_SCHEDULE` ("late", "random-7"),
    and whether there is a `LATE_DEFAULT_STREAM_KEEPS`."""
    name, _, seed = os.environ.get("LATE_SCHEDULE", "late").partition("-")
    set_schedule(name, int(seed or 0))
    set_default_stream_keeps("LATE_DEFAULT_STREAM_KEEPS" in os.environ)


def default_stream() -> torch.Stream:
    return Stream(stream_id=0, device_index=0, device_type=torch.Stream(device=NAME).device_type)


def set_schedule(name: str, seed: int = 0) -> None:
    """late: work runs when a synchronization needs it; eager: at once; random: in a legal order that `seed` draws."""
    torch.ops.late.set_schedule(name, seed)


def set_default_stream_keeps(keeps: bool) -> None:
    """Memory of the default stream that was freed keeps its values until the default stream allocates it again.

    Otherwise freed memory is NaN at once, as if another allocation had overwritten it. CUDA itself overwrites nothing.
    So the setting is right for processes in which nothing allocates on the default stream while another stream frees
    that stream's tensors.
    """
    torch.ops.late.set_default_stream_keeps(keeps)


def hidden_waits() -> dict[str, int]:
    """How often the host waited without asking to, by what made it wait: an operator (item, nonzero) or a copy."""
    return dict(torch.ops.late.hidden_waits())


@contextmanager
def counted_waits() -> Iterator[dict[str, int]]:
    """The hidden waits inside, known after the block."""
    torch.ops.late.forget_hidden_waits()
    counts: dict[str, int] = {}
    yield counts
    counts.update(hidden_waits())


@contextmanager
def no_hidden_waits() -> Iterator[None]:
    """Hidden waits inside are RuntimeErrors."""
    torch.ops.late.forbid_hidden_waits(True)
    try:
        yield
    finally:
        torch.ops.late.forbid_hidden_waits(False)


def _index(device: _Device) -> int:
    if device is None:
        return 0
    return device if isinstance(device, int) else torch.device(device).index or 0


class Stream(torch.Stream):
    """A stream of the device, as torch.cuda.Stream is one of CUDA."""

    def __new__(cls, device: _Device = None, priority: int = 0, **kwargs: Any) -> Stream:
        if kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, torch.device(NAME, _index(device)), priority=priority)


class Event(torch.Event):
    """An event of the device, as torch.cuda.Event is one of CUDA. A plain torch.Event: PyTorch measures no other's."""

    def __new__(  # type: ignore[misc]
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> torch.Event:
        return torch.Event(NAME, enable_timing=enable_timing)


class StreamContext:
    """`with StreamContext(stream)`: work queued inside goes to `stream`; None: changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self._last: torch.Stream | None = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self._last = torch.accelerator.current_stream()
            torch.accelerator.set_stream(self.stream)

    def __exit__(self, *raised: object) -> None:
        if self._last is not None:
            torch.accelerator.set_stream(self._last)


class DeviceContext:
    """`with torch.late.device(0)`: there is one device, so nothing changes."""

    def __init__(self, device: _Device) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        torch.accelerator.set_device_index(self.idx)

    def __exit__(self, *raised: object) -> None:
        return None


def get_rng_state(device: _Device = NAME) -> Tensor:
    return torch._C._accelerator_getDefaultGenerator(_index(device)).get_state()


def set_rng_state(state: Tensor, device: _Device = NAME) -> None:
    torch._C._accelerator_getDefaultGenerator(_index(device)).set_state(state)


def manual_seed_all(seed: int) -> None:
    torch._C._accelerator_getDefaultGenerator(0).manual_seed(int(seed))


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """Free and all bytes. Memory that the allocator keeps for reuse counts as free."""
    return torch.accelerator.get_memory_info(_index(device))


def is_current_stream_capturing() -> bool:
    return torch.accelerator.current_stream().is_capturing()


def _module() -> types.ModuleType:
    module = types.ModuleType(f"torch.{NAME}")
    values: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "device": DeviceContext,
        "_is_in_bad_fork": lambda: False,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "default_stream": lambda device=None: default_stream(),
        "device_count": lambda: 1,
        "empty_cache": lambda: None,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "get_device_name": lambda device=None: "late: emulated accelerator",
        "get_memory_info": mem_get_info,
        "get_rng_state": get_rng_state,
        "is_available": lambda: True,
        "is_bf16_supported": lambda: True,
        "is_current_stream_capturing": is_current_stream_capturing,
        "is_initialized": lambda: True,
        "manual_seed": manual_seed_all,
        "manual_seed_all": manual_seed_all,
        "max_memory_allocated": lambda device=None: torch.ops.late.used_bytes(),
        "mem_get_info": mem_get_info,
        "memory_allocated": lambda device=None: torch.ops.late.used_bytes(),
        "memory_reserved": lambda device=None: torch.ops.late.used_bytes(),
        "reset_peak_memory_stats": lambda device=None: None,
        "set_device": lambda device: torch.accelerator.set_device_index(_index(device)),
        "set_rng_state": set_rng_state,
        "set_stream": lambda stream: torch.accelerator.set_stream(stream),
        "synchronize": lambda device=None: torch.accelerator.synchronize(),
    }
    for name, value in values.items():
        setattr(module, name, value)
    sys.modules[module.__name__] = module
    return module
