"""The parameters of one run: shapes of the measured layers, weight formats, and what is measured of each."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kt_runtime.bench.experts.measurement import Patience
from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.experts.machine import default_threads, usable_processors
from kt_runtime.experts.native import resolve_isa
from kt_runtime.families.stack import ACTIVATIONS, SILU, SILU_CLAMPED, SWIGLU_OAI, ExpertMlp

BF16_BYTES = 2
PLAIN = ExpertMlp()
MLPS = {name: ExpertMlp(name) for name in ACTIVATIONS} | {
    SILU_CLAMPED: ExpertMlp(SILU_CLAMPED, 10.0),  # DeepSeek-V4's limit
    SWIGLU_OAI: ExpertMlp(SWIGLU_OAI, 7.0, 1.702, has_bias=True),  # gpt-oss
}
LORA_RANK = 8
LARGEST = 1 << 24
FORWARD, TRAINING = "forward", "forward_backward"
DEFAULT_SHAPES = ("dsv2lite", "qwen3")
DEFAULT_TOKENS = (1, 4, 16, 64, 512)
MOST_TOKENS = 1 << 16

T = TypeVar("T")


@dataclass(frozen=True)
class BenchShape:
    """The shape of a measured layer, and what its experts compute."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    rank: int = LORA_RANK
    mlp: ExpertMlp = dataclasses.field(default=PLAIN, kw_only=True)

    def __post_init__(self) -> None:
        for field in ("num_experts", "top_k", "hidden", "intermediate", "rank"):
            if not 1 <= getattr(self, field) <= LARGEST:
                raise InvalidValueError(f"shape {self.name}: {field} is {getattr(self, field)}; allowed: 1 to 2^24")
        if self.top_k > self.num_experts:
            raise InvalidValueError(
                f"shape {self.name}: a token has {self.top_k} experts, but there are {self.num_experts}"
            )

    @property
    def weights_per_expert(self) -> int:
        return (3 if self.mlp.has_gate else 2) * self.hidden * self.intermediate

    @property
    def bf16_bytes(self) -> int:
        """The layer's size in plain bfloat16."""
        return BF16_BYTES * self.num_experts * self.weights_per_expert

    def with_activation(self, mlp: ExpertMlp) -> BenchShape:
        """The shape's name says so, if it is another than SiLU."""
        return self if mlp == self.mlp else dataclasses.replace(self, mlp=mlp, name=f"{self.name} {mlp.activation}")

    def with_experts(self, num_experts: int) -> BenchShape:
        return dataclasses.replace(self, num_experts=num_experts)


SHAPES = {
    shape.name: shape
    for shape in (
        BenchShape("dsv2lite", 64, 6, 2048, 1408),
        BenchShape("qwen3", 128, 8, 2048, 768),
        BenchShape("dsv3", 256, 8, 7168, 2048),
        BenchShape("kimi", 384, 8, 7168, 2048),
    )
}


def parse_shape(text: str) -> BenchShape:
    """`text`: a name of SHAPES, or ExKxHxIxR such as 64x6x2048x1408x8. Raises UnknownNameError, InvalidValueError."""
    if text in SHAPES:
        return SHAPES[text]
    if not re.fullmatch(r"\d+([x,]\d+)*", text):
        raise UnknownNameError("shape", text, [*SHAPES, "EXPERTSxTOP_KxHIDDENxINTERMEDIATExRANK"])
    sizes = [int(size) for size in re.split("[x,]", text)]
    if len(sizes) != 5:
        raise InvalidValueError(
            f"shape {text!r} has {len(sizes)} numbers, expected five:"
            " experts x experts for a token x hidden x intermediate x LoRA rank, such as 64x6x2048x1408x8"
        )
    return BenchShape("x".join(map(str, sizes)), *sizes)


@dataclass(frozen=True)
class Encoding:
    """A checkpoint's weight storage: `bits` per weight, one scale per `group` columns (0: a row, fp8 blocks, or bf16).

    `gguf`: the type of a GGUF file's tensors; empty for safetensors.
    """

    bits: int
    group: int = 0
    zero_points: bool = False
    gguf: str = ""


# Checkpoint encodings by name.
ENCODINGS = {
    "bf16": Encoding(16),
    "fp8": Encoding(8),  # e4m3, blocks of 128 x 128, as DeepSeek ships it
    "int4_g32": Encoding(4, 32),  # compressed-tensors, as Kimi-K2 ships it
    "int4_g128": Encoding(4, 128),
    "int4_g128_zp": Encoding(4, 128, zero_points=True),
    "int8_g128": Encoding(8, 128),
    "int8_channel": Encoding(8),  # compressed-tensors, a scale a row
    "fp8_channel": Encoding(8),  # compressed-tensors, e4m3 with a scale a row
    "nvfp4": Encoding(4, 16),  # compressed-tensors
    "mxfp8": Encoding(8, 32),  # compressed-tensors
    # llama.cpp's files
    "q8_0": Encoding(8, 32, gguf="Q8_0"),
    "q4_0": Encoding(4, 32, gguf="Q4_0"),
    "q5_0": Encoding(5, 32, gguf="Q5_0"),
    "mxfp4": Encoding(4, 32, gguf="MXFP4"),
    "q4_k": Encoding(4, 32, gguf="Q4_K"),
    "q5_k": Encoding(5, 32, gguf="Q5_K"),
    "q6_k": Encoding(6, 16, gguf="Q6_K"),
    "iq4_nl": Encoding(4, 32, gguf="IQ4_NL"),
    "iq4_xs": Encoding(4, 32, gguf="IQ4_XS"),
}


@dataclass(frozen=True)
class BenchFormat:
    """`encoding`: of the checkpoint. `quantize`: the store's expert_format. `path`: forward's multiply instruction."""

    name: str
    encoding: str
    quantize: str | None
    path: str  # the peak to compare with: "bf16" or "int8"


FORMATS = {
    form.name: form
    for form in (
        BenchFormat("bf16", "bf16", None, "bf16"),
        BenchFormat("fp8", "fp8", None, "bf16"),
        BenchFormat("int8", "bf16", "int8", "int8"),  # a scale a row, quantized while loading
        BenchFormat("int4", "bf16", "int4", "int8"),  # groups of 32 columns, quantized while loading
        BenchFormat("int4_g32", "int4_g32", None, "int8"),
        BenchFormat("int4_g128", "int4_g128", None, "int8"),
        BenchFormat("int4_g128_zp", "int4_g128_zp", None, "int8"),
        BenchFormat("int8_g128", "int8_g128", None, "int8"),
        BenchFormat("int8_channel", "int8_channel", None, "int8"),
        BenchFormat("fp8_channel", "fp8_channel", None, "bf16"),
        BenchFormat("nvfp4", "nvfp4", None, "int8"),
        BenchFormat("mxfp8", "mxfp8", None, "bf16"),
        *(BenchFormat(name, name, None, "int8") for name, encoding in ENCODINGS.items() if encoding.gguf),
    )
}
DEFAULT_FORMATS = ("bf16", "fp8", "int8", "int4")


def parse_format(name: str) -> BenchFormat:
    if name not in FORMATS:
        raise UnknownNameError("format", name, FORMATS)
    return FORMATS[name]


@dataclass(frozen=True)
class Plan:
    """The parameters of one run."""

    shapes: tuple[BenchShape, ...]
    formats: tuple[BenchFormat, ...]
    isas: tuple[str, ...]
    threads: tuple[int, ...]
    tokens: tuple[int, ...]
    ops: tuple[str, ...]  # empty: forward everywhere, forward_backward with the most tokens only
    peer: Path | None  # a Python interpreter with kt-kernel
    with_torch: bool
    patience: Patience

    def cases(self) -> list[tuple[int, str]]:
        """(tokens, op), forward before forward_backward."""
        if self.ops:
            return [(tokens, op) for tokens in self.tokens for op in (FORWARD, TRAINING) if op in self.ops]
        return [*((tokens, FORWARD) for tokens in self.tokens), (max(self.tokens), TRAINING)]


def make_plan(
    *,
    shapes: Sequence[str] = (),
    formats: Sequence[str] = (),
    isas: Sequence[str] = (),
    threads: Sequence[int] = (),
    tokens: Sequence[int] = (),
    ops: Sequence[str] = (),
    num_experts: int | None = None,
    peer: Path | None = None,
    with_torch: bool = True,
    activations: Sequence[str] = (),
    patience: Patience,
) -> Plan:
    """A plan; an empty sequence means the default. Raises UnknownNameError, InvalidValueError."""
    processors = usable_processors()
    for count in threads:
        if not 1 <= count <= processors:
            raise InvalidValueError(f"--threads is {count}; this process may use 1 to {processors} processors")
    for count in tokens:
        if not 1 <= count <= MOST_TOKENS:
            raise InvalidValueError(f"--tokens is {count}; allowed: 1 to {MOST_TOKENS}")
    if patience.runs < 1 or not patience.seconds > 0:
        raise InvalidValueError(f"--runs is {patience.runs} and --seconds {patience.seconds}; both must be positive")
    activations = tuple(_unique(activations)) or (SILU,)
    for activation in activations:
        if activation not in MLPS:
            raise UnknownNameError("activation", activation, MLPS)
        if activation != SILU and peer is not None:
            raise InvalidValueError(
                f"--activation is {activation!r}, and --peer is given: kt-kernel is measured with {SILU!r}"
            )
    shaped = [parse_shape(text) for text in shapes or DEFAULT_SHAPES]
    made = [shape.with_activation(MLPS[activation]) for shape in shaped for activation in activations]
    chosen = [parse_format(name) for name in formats or DEFAULT_FORMATS]
    for shape, form in itertools.product(made, chosen):
        _check_groups(shape, form)
    return Plan(
        tuple(_unique(made if num_experts is None else [_shrunk(shape, num_experts) for shape in made])),
        tuple(_unique(chosen)),
        tuple(_unique(resolve_isa(name) for name in isas)) or (resolve_isa(None),),
        tuple(_unique(threads or (1, default_threads()))),
        tuple(sorted(set(tokens or DEFAULT_TOKENS))),
        tuple(ops),
        peer,
        with_torch and activations == (SILU,),
        patience,
    )


def _check_groups(shape: BenchShape, form: BenchFormat) -> None:
    group = ENCODINGS[form.encoding].group
    for columns in (shape.hidden, shape.intermediate):
        if group and columns % group:
            raise InvalidValueError(
                f"shape {shape.name}, format {form.name}: {columns} columns have no groups of {group} columns"
            )


def _shrunk(shape: BenchShape, num_experts: int) -> BenchShape:
    if not shape.top_k <= num_experts <= shape.num_experts:
        raise InvalidValueError(
            f"--experts is {num_experts}; shape {shape.name} has {shape.num_experts}, a token takes {shape.top_k}"
        )
    return shape.with_experts(num_experts)


def _unique(items: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(items))
