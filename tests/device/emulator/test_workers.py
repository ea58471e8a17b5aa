"""Worker threads of the resident beside an engine that works on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kt_runtime.resident.workers import Workers


def done(workers: Workers, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    workers.begin("job", "a file", make)
    value: torch.Tensor = workers.take("job")
    return value


def test_a_worker_gets_no_memory_that_the_engine_still_reads(scheduled_device: torch.device) -> None:
    """A session's masters come from a worker; the engine reads and frees them; another session's come next."""
    workers = Workers("test", lambda key, error: None)
    with torch.Stream(device=scheduled_device):
        masters = done(workers, lambda: torch.ones(1000).to(scheduled_device))
        total = masters.sum()
        del masters
        others = done(workers, lambda: torch.full((1000,), 2.0).to(scheduled_device))
        assert total.item() == 1000 and others.sum().item() == 2000
    workers.close()
