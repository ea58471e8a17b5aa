"""The compiled module (csrc/bind/module.cpp). Private: use kt_runtime.experts. Tensors arrive as DLPack capsules."""

from collections.abc import Mapping, Sequence
from typing import Any

class NativeError(RuntimeError):
    """args: (kind, message); kind is invalid_value, unknown_name, not_found, bad_checkpoint, numerics or
    lost_rank."""

class Checkpoint:
    """Open files and where their tensors lie; nothing is read before `load_layer`.

    quantization: config.json's quantization_config, of None, bool, int, float, str, list and dict.
    """

    def __init__(self, directory: str, quantization: Mapping[str, Any] | None, /) -> None: ...
    def add_file(
        self, path: str, descriptor: int, tensors: Mapping[str, tuple[str, tuple[int, ...], int, int]], /
    ) -> None:
        """Keeps its own copy of the descriptor. tensors: name → dtype, shape, first byte in the file, byte after."""

class Retained:
    """Activations between a forward and its backward."""

    @property
    def bytes(self) -> int: ...

class PieceBytes:
    """Supports the buffer protocol: the packed bytes of one matrix on one memory node, read-only."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

class Layer:
    @property
    def format(self) -> str: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def node_bytes(self) -> list[int]: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    def piece_bytes(self, expert: int, projection: int, node: int, /) -> PieceBytes: ...
    def bias_bytes(self, expert: int, /) -> PieceBytes: ...
    def forward(
        self,
        *,
        x: Any,
        ids: Any,
        weights: Any,
        slots: Sequence[tuple[Any, ...] | None],
        token_slots: Any,
        out: Any,
        retain: bool,
    ) -> Retained | None: ...
    def backward(
        self,
        *,
        grad_out: Any,
        x: Any,
        ids: Any,
        weights: Any,
        slots: Sequence[tuple[Any, ...] | None],
        token_slots: Any,
        x_grad: Any,
        weights_grad: Any,
        slot_grads: Sequence[tuple[Any, ...] | None],
        retained: Retained | None,
    ) -> None: ...
    def combine(self, rows: Any, row_of: Any, weights: Any, out: Any, /) -> None: ...
    def unpack(self, expert: int, gate: Any, up: Any, down: Any, /) -> None: ...
    def unpack_range(self, first: int, count: int, w13: Any, w2: Any, /) -> None: ...

def attend(
    *,
    isa: str,
    num_threads: int,
    q: Any,
    keys: Any,
    values: Any,
    out: Any,
    log_sums: Any,
    sequences: Any,
    slots: Any,
    scaling: float,
    logit_cap: float,
    sinks: Any,
    window: int,
    chosen: Any,
) -> None:
    """Attention over a KV pool (csrc/ops/attention.h). sequences: int64 [B, 4], as experts.attention.Sequences.rows."""

def prepare_index_rows(isa: str, num_threads: int, /, *operands: Any) -> None: ...
def select_keys(isa: str, num_threads: int, /, *operands: Any) -> None: ...
def gated_delta(
    *,
    isa: str,
    num_threads: int,
    x: Any,
    a: Any,
    b: Any,
    filter: Any,
    log_rate: Any,
    bias: Any,
    heads: Any,
    sequences: Any,
    inputs: Any,
    states: Any,
    out: Any,
) -> None:
    """csrc/ops/delta/gated_delta.h. inputs, states: None where nothing is kept."""

def gated_delta_backward(
    *,
    isa: str,
    num_threads: int,
    by_out: Any,
    x: Any,
    a: Any,
    b: Any,
    filter: Any,
    log_rate: Any,
    bias: Any,
    heads: Any,
    sequences: Any,
    by_x: Any,
    by_a: Any,
    by_b: Any,
) -> None: ...
def attend_backward(
    *,
    isa: str,
    num_threads: int,
    by_out: Any,
    q: Any,
    keys: Any,
    values: Any,
    out: Any,
    log_sums: Any,
    sequences: Any,
    scaling: float,
    window: int,
    by_q: Any,
    by_keys: Any,
    by_values: Any,
    chosen: Any,
) -> None:
    """Gradients of `attend` without slots and cap (csrc/ops/attention_backward.h)."""

class PackedMatrix:
    """The matrix [rows, cols] of a linear layer (csrc/weights/packed.h). Its buffer is the packed bytes.

    parts: (GGUF type, rows), below each other. `ends`: the row after the last of each part.
    """

    rows: int
    cols: int
    ends: list[int]
    formats: list[str]

    def __init__(self, parts: Sequence[tuple[str, int]], cols: int, /) -> None: ...
    def fill(self, part: int, kind: str, first_row: int, blocks: Any, /) -> int:
        """Packs rows of a part; `blocks`: a buffer of their GGUF blocks. The index of a block with a bad scale, or
        -1."""

    def slice(self, first: int, count: int, /) -> PackedMatrix:
        """Some parts, over the same memory."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

class Dense:
    """A decoder layer's operations but attention and routed experts (csrc/ops: dense, heads, low_rank, activation,
    rotary, router, grouped_router), with one instruction set, "" for the best, and number of threads.
    """

    def __init__(self, isa: str, num_threads: int, /) -> None: ...
    def linear(self, x: Any, weight: Any, bias: Any, out: Any, /) -> None: ...
    def linear_backward(self, by_out: Any, weight: Any, by_x: Any, /) -> None: ...
    def linear_packed(self, x: Any, weight: PackedMatrix, bias: Any, out: Any, /) -> None: ...
    def linear_packed_backward(self, by_out: Any, weight: PackedMatrix, by_x: Any, /) -> None: ...
    def linear_heads(self, x: Any, weight: Any, out: Any, /) -> None: ...
    def linear_heads_backward(self, by_out: Any, weight: Any, by_x: Any, /) -> None: ...
    def linear_added(self, x: Any, weight: Any, alpha: float, base: Any, out: Any, /) -> None: ...
    def inner_product(self, a: Any, b: Any, alpha: float, out: Any, /) -> None: ...
    def silu_and_multiply(self, gate: Any, up: Any, out: Any, /) -> None: ...
    def silu_and_multiply_backward(self, by_out: Any, gate: Any, up: Any, by_gate: Any, by_up: Any, /) -> None: ...
    def sigmoid_and_multiply(self, gate: Any, x: Any, out: Any, /) -> None: ...
    def sigmoid_and_multiply_backward(self, by_out: Any, gate: Any, x: Any, by_gate: Any, by_x: Any, /) -> None: ...
    def rotate(self, x: Any, angles: Any, positions: Any, interleaved: bool, inverse: bool, out: Any, /) -> None: ...
    def choose_from_groups(
        self,
        logits: Any,
        bias: Any,
        groups: int,
        top_groups: int,
        is_sigmoid: bool,
        normalises: bool,
        scaling: float,
        weights: Any,
        ids: Any,
        /,
    ) -> None: ...
    def rms_norm_backward(self, by_out: Any, x: Any, weight: Any, inverse: Any, by_x: Any, /) -> None: ...
    def rms_norm(
        self, x: Any, residual: Any, weight: Any, epsilon: float, out: Any, total: Any, inverse: Any, /
    ) -> None: ...
    def choose_experts(self, logits: Any, normalises: bool, weights: Any, ids: Any, /) -> None: ...
    def weigh_experts(self, logits: Any, normalises: bool, ids: Any, weights: Any, /) -> None: ...
    def weigh_from_groups(
        self, logits: Any, is_sigmoid: bool, normalises: bool, scaling: float, ids: Any, weights: Any, /
    ) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def num_threads(self) -> int: ...

class Exchange:
    """What the ranks of a model send each other (csrc/ranks/exchange.h)."""

    @staticmethod
    def shared(descriptor: int, processes: Sequence[int], rank: int, patience_seconds: float, /) -> Exchange:
        """Through a file of `file_bytes` zeros that all ranks have open; the descriptor stays the caller's."""

    @staticmethod
    def connected(rank: int, sockets: Sequence[int], names: Sequence[str], /) -> Exchange:
        """Through connected sockets to the other ranks, in the ranks' order, which are the exchange's from now on."""

    @staticmethod
    def file_bytes(num_ranks: int, /) -> int: ...
    def gather_columns(self, matrix: Any, /) -> None: ...
    def gather_rows(self, own: Any, counts: Sequence[int], out: Any, /) -> None: ...
    def give_up(self) -> None: ...
    @property
    def waited_seconds(self) -> float: ...
    @property
    def sent_bytes(self) -> int: ...

class Step:
    """The decoder stack as one call (csrc/step/program.h).

    table: the fields of `Stack` by name (csrc/step/stack.h) with `groups` as (groups, top_groups, is_sigmoid, scaling)
    or None; `layers` is a list of dictionaries. `attention`, `mlp`, `routed` and `lora` of a layer are dictionaries;
    the last three may be None. Tensors are capsules, absent ones None; `experts` is a Layer, `exchange` an Exchange or
    None. The object keeps them all.
    """

    def __init__(self, isa: str, num_threads: int, table: dict[str, Any], /) -> None: ...
    def run(
        self,
        *,
        ids: Any,
        positions: Any,
        slots: Any,
        sequences: Any,
        table: Any,
        states: Any,
        adapter_rows: Sequence[tuple[int, int, int, int, float]],
        expert_adapters: Sequence[tuple[int, int, float]],
        token_slots: Any,
        out: Any,
        routes: Any,
    ) -> list[int]: ...
    def free_scratch(self) -> None:
        """Nothing, while a batch runs in another thread."""

    @property
    def scratch_bytes(self) -> int: ...

def spare_memory_bytes() -> int: ...
def free_spare_memory() -> None: ...
def available_isas() -> list[str]: ...
def resolve_isa(name: str) -> str: ...
def default_num_threads() -> int: ...
def memory_nodes(num_threads: int, /) -> list[tuple[int, list[int], int]]:
    """Of each: the system's number, the processors that this process may use, threads that run there."""

def probe_placement(node: int, /) -> int:
    """Asks for one page on a memory node: 0, or errno."""

def placement_counts() -> tuple[int, int, int]:
    """Requests for a memory node granted, refused, and errno of the last refusal."""

def load_layer(
    *,
    checkpoint: Checkpoint,
    prefix: str,
    num_experts: int,
    hidden: int,
    intermediate: int,
    mlp: tuple[str, float, float, bool, bool, bool],
    isa: str,
    num_threads: int,
    expert_format: str,
    num_nodes: int,
    share: tuple[int, int],
) -> Layer:
    """mlp: activation, limit, alpha (0 where it has none), whether there are biases, whether fused tensors are
    interleaved and transposed. expert_format "": as the checkpoint stores it. num_nodes 0: the memory nodes of this
    machine. share: the first expert that is loaded, and their number.
    """

def measure_peak(isa: str, operation: str, num_threads: int, passes: int = 60) -> float: ...

class MemoryReader:
    """Reads a quarter of `bytes` of memory at a time, on the pool's threads."""

    def __init__(self, bytes: int) -> None: ...
    def rate(self, isa: str, num_threads: int) -> float:
        """Bytes per second of the next quarter."""
    @property
    def bytes_at_once(self) -> int: ...

def take_engine_seconds() -> float:
    """What this thread's calls on experts took since it was last asked, without Python and checks of arguments."""

class WorkersAwake:
    """While it is entered, the pool's workers spin between jobs, as in a step."""

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
