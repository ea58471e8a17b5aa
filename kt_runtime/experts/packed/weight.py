"""A linear layer's matrix that stays quantized: packed like those of the routed experts (csrc/weights/packed.h).

It stands where SGLang's module and the training twin have their parameter, with the shape and the dtype of the matrix
that it replaces. `experts.dense` multiplies by it. It has no elements: PyTorch's operators refuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kt_runtime import _experts
from kt_runtime.errors import InvalidValueError

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class PackedWeight(torch.Tensor):
    """A matrix [N, K]. `dtype`: that of the activations that it multiplies, the model's.

    It consists of several tensors below each other, whose formats may differ. A slice of rows must be whole tensors.
    `readers`: if these are a rank's rows, a function for each tensor that reads some columns of all of its rows.
    """

    native: _experts.PackedMatrix
    readers: tuple[Callable[[range], PackedWeight], ...]
    _address: int

    @staticmethod
    def __new__(
        cls,
        native: _experts.PackedMatrix,
        dtype: torch.dtype,
        readers: Sequence[Callable[[range], PackedWeight]] = (),
    ) -> PackedWeight:
        made: PackedWeight = torch.Tensor._make_wrapper_subclass(
            cls, (native.rows, native.cols), dtype=dtype, device=torch.device("cpu"), requires_grad=False
        )
        made.native, made.readers = native, tuple(readers)
        made._address = made.content().data_ptr()
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _SAME:
            return cls(args[0].native, args[0].dtype, args[0].readers)
        raise InvalidValueError(f"{func} of a packed matrix: only linear layers of kt-runtime can use it")

    def __init__(
        self,
        native: _experts.PackedMatrix,
        dtype: torch.dtype,
        readers: Sequence[Callable[[range], PackedWeight]] = (),
    ) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedWeight({list(self.shape)}, {' + '.join(self.native.formats)})"

    def __getitem__(self, rows: Any) -> PackedWeight:
        """Rows [start, stop), which must be whole tensors. InvalidValueError: they are not."""
        ends = self.native.ends
        start, stop, step = rows.indices(self.shape[0])
        starts = [0, *ends[:-1]]
        if step != 1 or start not in starts or stop not in ends or stop <= start:
            raise InvalidValueError(f"rows {start}:{stop} of a packed matrix, whose tensors end at rows {ends}")
        first = starts.index(start)
        last = ends.index(stop) + 1
        return PackedWeight(self.native.slice(first, last - first), self.dtype, self.readers[first:last])

    def columns(self, which: range) -> PackedWeight:
        """[O, len(which)]: these columns, whole blocks, of all O rows of the tensor of which this has a rank's rows.

        Read anew from the file, with its errors. InvalidValueError: these are not a rank's rows of one tensor.
        """
        if len(self.readers) != 1:
            raise InvalidValueError(f"columns of a packed matrix of {len(self.readers)} tensors that are split; of one")
        return self.readers[0](which)

    def content(self) -> torch.Tensor:
        """The packed bytes: a uint8 tensor over the same memory, for reading."""
        return torch.frombuffer(memoryview(self.native), dtype=torch.uint8)

    def data_ptr(self) -> int:
        return self._address

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the packed matrix."""
        return memoryview(self.native).nbytes
