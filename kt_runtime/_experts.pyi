"""The compiled module (csrc/bind/module.cpp). Private: use kt_runtime.experts. Tensors arrive as DLPack capsules."""

from collections.abc import Sequence
from typing import Any

class NativeError(RuntimeError):
    """args: (kind, message); kind is invalid_value, unknown_name, not_found, bad_checkpoint or numerics."""

class Checkpoint: ...

class Layer:
    """Supports the buffer protocol: its packed bytes, read-only."""

    @property
    def weight_bytes(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def forward(
        self, x: Any, ids: Any, weights: Any, slots: Sequence[tuple[Any, ...] | None], token_slots: Any, out: Any, /
    ) -> None: ...
    def backward(
        self,
        grad_out: Any,
        x: Any,
        ids: Any,
        weights: Any,
        slots: Sequence[tuple[Any, ...] | None],
        token_slots: Any,
        x_grad: Any,
        weights_grad: Any,
        slot_grads: Sequence[tuple[Any, ...] | None],
        /,
    ) -> None: ...
    def unpack(self, expert: int, gate: Any, up: Any, down: Any, /) -> None: ...

def available_isas() -> list[str]: ...
def resolve_isa(name: str) -> str: ...
def default_num_threads() -> int: ...
def open_checkpoint(directory: str) -> Checkpoint: ...
def load_layer(
    checkpoint: Checkpoint,
    prefix: str,
    num_experts: int,
    hidden: int,
    intermediate: int,
    isa: str,
    num_threads: int,
    /,
) -> Layer: ...
