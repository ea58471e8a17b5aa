"""Memory of the device is out of the host's reach, and holds poison where nothing was written."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from device import backend


def filled(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((1000,), value, device=device)


@pytest.mark.parametrize("access", ["ctypes.c_char.from_address({}).value", "ctypes.memset({}, 0, 1)"])
def test_the_host_that_touches_the_devices_memory_faults(access: str) -> None:
    code = "import ctypes; from device import backend; import torch; t = torch.ones(9, device=backend.enable());"
    code += f"torch.accelerator.synchronize(); print('here', flush=True); {access.format('t.data_ptr()')}"
    run = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert (run.stdout, run.returncode) == ("here\n", -signal.SIGSEGV), run.stderr


def test_fresh_memory_is_nan(late_device: torch.device) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert torch.empty(999, dtype=dtype, device=late_device).isnan().all()
    assert torch.empty(9, dtype=torch.int64, device=late_device).min() > 2**62
    assert torch.empty(9, pin_memory=True).isnan().all()


def test_a_freed_block_is_reused_at_once_on_its_stream_and_is_nan(scheduled_device: torch.device) -> None:
    block = filled(1.0, scheduled_device)
    place = block.data_ptr()
    del block
    again = torch.empty(1000, device=scheduled_device)
    assert again.data_ptr() == place and again.isnan().all()


def test_work_queued_before_memory_was_freed_still_reads_it(scheduled_device: torch.device) -> None:
    block = filled(1.0, scheduled_device)
    total = block.sum()
    del block
    again = filled(2.0, scheduled_device)
    assert total.item() == 1000 and again.sum().item() == 2000


def test_a_block_used_on_another_stream_is_not_reused_before_that_stream_is_done(late_device: torch.device) -> None:
    stream = torch.Stream(device=late_device)
    block = filled(1.0, late_device)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        total = block.sum()
    block.record_stream(stream)
    place = block.data_ptr()
    del block
    assert filled(2.0, late_device).data_ptr() != place
    stream.synchronize()
    assert filled(3.0, late_device).data_ptr() == place
    with stream:
        assert total.item() == 1000


def test_without_record_stream_another_stream_may_read_what_came_after(late_device: torch.device) -> None:
    stream = torch.Stream(device=late_device)
    block = filled(1.0, late_device)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        total = block.sum()
    del block
    filled(2.0, late_device)
    torch.accelerator.current_stream().synchronize()
    with stream:
        assert total.item() != 1000


def test_the_default_stream_s_freed_memory_can_keep_its_values_until_it_is_allocated_again(
    late_device: torch.device,
) -> None:
    """As SGLang's scheduler needs it: a list of free pages, made on the default stream, is replaced on another one."""

    def replaced(*, reused: bool) -> torch.Tensor:
        pages = filled(1.0, late_device)
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            rest = pages + 1
        del pages
        if reused:
            torch.empty(1000, device=late_device)
        torch.accelerator.current_stream().synchronize()  # the other stream is the later one
        with stream:
            return rest.cpu()

    stream = torch.Stream(device=late_device)
    assert replaced(reused=False).isnan().all()
    backend.set_default_stream_keeps(True)
    try:
        assert (replaced(reused=False) == 2).all()
        assert replaced(reused=True).isnan().all()
    finally:
        backend.set_default_stream_keeps(False)


def test_memory_is_counted_and_ends_with_an_error(late_device: torch.device) -> None:
    free, total = torch.accelerator.get_memory_info()
    block = torch.empty(1 << 20, dtype=torch.uint8, device=late_device)
    assert torch.accelerator.get_memory_info() == (free - (1 << 20), total)
    with pytest.raises(torch.OutOfMemoryError, match=f"late: out of memory: {total} bytes wanted"):
        torch.empty(total, dtype=torch.uint8, device=late_device)
    del block
    assert torch.accelerator.get_memory_info() == (free, total)


def test_after_streams_are_awaited_any_stream_may_have_the_memory(late_device: torch.device) -> None:
    total = torch.accelerator.get_memory_info()[1]
    with torch.Stream(device=late_device):
        large = torch.empty(1 << 20, dtype=torch.uint8, device=late_device)
        del large
    assert torch.empty(torch.accelerator.get_memory_info()[0], dtype=torch.uint8, device=late_device).numel() <= total
