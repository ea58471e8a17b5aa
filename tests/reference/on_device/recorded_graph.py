"""A stand-in for `torch.cuda.CUDAGraph` without CUDA: SGLang's own breakable graphs capture and replay with it.

It records the operators of PyTorch between `capture_begin` and `capture_end`, and runs them again on the same memory.
As on CUDA, a capture leaves no results: what the operators wrote is overwritten with NaN when the capture ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kt_runtime import device


@dataclass
class Call:
    operator: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any

    def again(self) -> None:
        found = self.operator(*self.args, **self.kwargs)
        for old, new in zip(_tensors(self.result), _tensors(found), strict=True):
            if old.data_ptr() != new.data_ptr() and not self.is_new_memory:
                old.copy_(new)

    def lose_results(self) -> None:
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((self.args, self.kwargs))}
        for tensor in _tensors(self.result):
            if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in given:
                tensor.fill_(float("nan"))

    @property
    def is_new_memory(self) -> bool:
        return getattr(self.operator, "overloadpacket", None) in (torch.ops.aten.empty, torch.ops.aten.empty_like)


def _tensors(of: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(of) if isinstance(leaf, torch.Tensor)]


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append(Call(func, args, dict(kwargs or {}), result))
        return result


class RecordedGraph:
    """`log`: every segment that is replayed, by its number."""

    log: list[str]

    def __init__(self, keep_graph: bool = False) -> None:
        self.calls: list[Call] = []
        self._recorder = _Recorder(self.calls)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._recorder.__enter__()

    def capture_end(self) -> None:
        self._recorder.__exit__(None, None, None)
        self.number = len([entry for entry in self.log if entry.startswith("captured")])
        self.log.append(f"captured {self.number}")
        for call in self.calls:
            call.lose_results()

    def replay(self) -> None:
        self.log.append(f"replayed {self.number}")
        for call in self.calls:
            call.again()


class GraphBackend:
    """SGLang's own backend of breakable graphs, without its runner: one graph for each key.

    `stream`, `pool`: where CUDA captures; a recorded graph needs neither.
    """

    def __init__(self, stream: Any = None, pool: Any = None) -> None:
        from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend

        self.backend = object.__new__(BreakableCudaGraphBackend)
        self.backend._graphs, self.backend._outputs = {}, {}
        self._stream, self._pool = stream, pool

    @contextmanager
    def session(self) -> Iterator[None]:
        with self.backend.replay_session():
            yield

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """After what is queued on the current stream, and before what will be."""
        if self._stream is None:
            yield
            return
        where = self._stream.device
        self._stream.wait_event(device.recorded(device=where))
        with device.on(self._stream):
            yield
        device.current_stream(where).wait_event(device.recorded(self._stream))

    def capture(self, key: Any, forward: Callable[[], torch.Tensor], *, warm_ups: int = 2) -> None:
        """As `BreakableCudaGraphBackend.capture_one`: eager passes, then the capture."""
        from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
            BreakableCUDAGraph,
            BreakableCUDAGraphCapture,
        )

        with self.session(), self._on_stream():
            for _ in range(warm_ups):
                forward()
            graph = BreakableCUDAGraph()
            with BreakableCUDAGraphCapture(graph, pool=self._pool, stream=self._stream):
                self.backend._outputs[key] = forward()
            self.backend._graphs[key] = graph

    def replay(self, key: Any, batch: Any) -> torch.Tensor:
        """Through kt-runtime's hook, which an accelerator's process has around SGLang's method."""
        from kt_runtime.sglang_patch.gpu import replays

        with self.session():
            result: torch.Tensor = replays.replay(type(self.backend).replay, self.backend, key, batch)
            return result
