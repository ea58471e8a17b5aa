"""Parses the `quantization_config` of a config.json: the layout of matrices on disk, and experts' sizes in memory.

A quantized matrix `NAME.weight` [out, in] lies on disk as several tensors. With P = 32 / bits codes in an int32, and
G groups of columns that share a scale:

    fp8                 weight F8_E4M3 [out, in], weight_scale_inv [ceil(out / 128), ceil(in / 128)]
    compressed-tensors  weight_packed [out, ceil(in / P)], weight_scale [out, G], weight_shape [2]; with zero points
      pack-quantized    weight_zero_point [ceil(out / P), G]
      int-quantized     weight I8 [out, in], weight_scale [out, G]; with zero points weight_zero_point I8 [out, G]
      float-quantized   weight F8_E4M3 [out, in], weight_scale [out, 1] or in blocks as with fp8
      naive-quantized   as int-quantized or float-quantized, by the type of the weights
      nvfp4-pack-quantized  weight_packed U8 [out, in / 2], weight_scale F8_E4M3 [out, in / 16], and of the matrix
                        weight_global_scale F32 [1], by which these scales are divided
      mxfp4-pack-quantized  weight_packed as nvfp4, weight_scale U8 (an exponent and 127) [out, in / 32]
      mxfp8-quantized   weight F8_E4M3 [out, in], weight_scale U8 (an exponent and 127) [out, in / 32]
    modelopt            NVFP4: weight U8 [out, in / 2], weight_scale F8_E4M3 [out, in / 16], weight_scale_2 F32 [], a
                        factor of these scales
    mxfp8               weight F8_E4M3 [out, in], weight_scale_inv U8 [out, in / 32]
    gptq                qweight [in / P, out], scales [G, out], qzeros [G, out / P] (one less than the zero, but not in
                        `gptq_v2`), g_idx [in]
    awq                 qweight [in, out / P], scales [G, out], qzeros [G, out / P], codes in the order 0 2 4 6 1 3 5 7

    mxfp4               fused experts only: NAME_blocks U8 [E, out, in / 32, 16], two e2m1 codes a byte, NAME_scales U8
                        [E, out, in / 32], exponents (gpt-oss)

    gguf                the tensors of llama.cpp's files, which `files` names; `experts` holds the types of each
                        layer's experts, [gate and up, down] (gguf.py), `dense` those of the tensors of linear layers
                        that stay quantized, by Hugging Face's names. Only kt-runtime writes such a config

Which matrices are quantized follows from the checkpoint's tensors, not from the config (`ignore`,
`modules_to_not_convert`). Scales of activations (`input_scale`, `input_global_scale`) are ignored. This module takes
from the config the method, and refuses parameters that are unsupported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from kt_runtime.errors import CheckpointError, UnknownNameError
from kt_runtime.families import gguf
from kt_runtime.families.base import Config

FP8_BLOCK = 128
ZERO_POINT_GROUP = 128  # the store's group size where a checkpoint has one zero point per row
FLOAT_QUANTIZED = "compressed-tensors float-quantized"
NVFP4, MODELOPT_NVFP4 = "compressed-tensors nvfp4-pack-quantized", "modelopt NVFP4"
COMPRESSED_MXFP4, COMPRESSED_MXFP8 = "compressed-tensors mxfp4-pack-quantized", "compressed-tensors mxfp8-quantized"
NVFP4_GROUP, MX_GROUP = 16, 32
CODE_BITS = (4, 8)
BLOCK_ROWS, COLUMN_UNIT, LINE_BYTES = 16, 32, 64  # csrc/kernels/layout.h
FUSED_MXFP4 = "mxfp4"  # gpt-oss
CONFIG_KEYS = ("quantization_config", "compression_config")
SCALES = ("F32", "BF16", "F16")
INT32 = ("I32",)
EXPONENTS = ("U8", "F8_E8M0")
_ENCODINGS = {
    **dict.fromkeys(("fp8", FLOAT_QUANTIZED), "fp8_e4m3"),
    **dict.fromkeys((NVFP4, MODELOPT_NVFP4), "nvfp4"),
    **dict.fromkeys((COMPRESSED_MXFP8, "mxfp8"), "mxfp8"),
    **dict.fromkeys((COMPRESSED_MXFP4, FUSED_MXFP4), "mxfp4"),
}
"""The store's encoding for each method whose codes are floats."""
_BITS = {"bf16": 16, "fp8_e4m3": 8, "mxfp8": 8, "int8": 8, "int4": 4, "nvfp4": 4, "mxfp4": 4}
_GROUP_SCALE_BYTES = {"fp8_e4m3": 4, **dict.fromkeys(("mxfp8", "mxfp4", "nvfp4"), BLOCK_ROWS)}
"""Bytes of the scales of a group of columns in a block of rows; other encodings have float16 scales."""


@dataclass(frozen=True, slots=True)
class ExpertFormat:
    """The expert store's format of a matrix. `group`: columns that share a scale; 0: one scale per row.

    `encoding`: "bf16", "fp8_e4m3", "mxfp8", "int8", "int4", "nvfp4" or "mxfp4".
    """

    encoding: str
    group: int = 0
    zero_points: bool = False

    @property
    def name(self) -> str:
        """The format's name in `kt_runtime._experts`, such as `int4_g128_zp`."""
        return self.encoding + (f"_g{self.group}" if self.group else "") + ("_zp" if self.zero_points else "")

    def packed_bytes(self, rows: int, cols: int) -> int:
        """Bytes of one matrix in the packed layout of csrc/kernels/layout.h."""
        cols = _round_up(cols, COLUMN_UNIT)
        groups = ceil(cols / self.group) if self.group else 0
        scale_bytes = 0 if self.encoding == "bf16" else BLOCK_ROWS * 4
        scale_bytes += _round_up(groups * _GROUP_SCALE_BYTES.get(self.encoding, 2 * BLOCK_ROWS), LINE_BYTES)
        zero_bytes = _round_up(groups * BLOCK_ROWS, LINE_BYTES) if self.zero_points else 0
        return ceil(rows / BLOCK_ROWS) * (scale_bytes + zero_bytes + cols * BLOCK_ROWS * _BITS[self.encoding] // 8)


@dataclass(frozen=True, slots=True)
class GgufExperts(ExpertFormat):
    """`types`: of each layer, (gate and up, down); `encoding`: the formats' names, joined by "+"."""

    types: tuple[tuple[str, str], ...] = ()

    def packed_bytes(self, rows: int, cols: int) -> int:
        """The mean of all layers' matrices."""
        sizes = [2 * gguf.packed_bytes(up, rows, cols) + gguf.packed_bytes(down, rows, cols) for up, down in self.types]
        return ceil(sum(sizes) / (3 * len(sizes)))


BF16 = ExpertFormat("bf16")
QUANTIZED_WHILE_LOADING = {"int8": ExpertFormat("int8"), "int4": ExpertFormat("int4", 32)}
"""Formats by their names for `--expert-format`."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`dtypes`: the allowed ones, as safetensors spells them."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    is_optional: bool = False

    def has_shape(self, shape: tuple[int, ...]) -> bool:
        """A single number may be stored with one dimension or with none."""
        return shape == self.shape or {shape, self.shape} == {(), (1,)}


@dataclass(frozen=True, slots=True)
class Quantization:
    """`method`: quant_method, for compressed-tensors with its format. `symmetric`: every zero point is the middle code.

    `group`: columns that share a scale; 0: one scale per row. `stored_zero_offset`: zero point minus its stored value.
    """

    method: str
    bits: int
    group: int
    symmetric: bool = True
    stored_zero_offset: int = 0

    @property
    def description(self) -> str:
        group = f"groups of {self.group}" if self.group else "one scale a row"
        if self.group and self.expert_format.encoding == "fp8_e4m3":
            group = f"blocks of {self.group}x{self.group}"
        return f"{self.method}, {self.bits} bits, {group}" + ("" if self.symmetric else ", zero points")

    @property
    def expert_format(self) -> ExpertFormat:
        encoding = _ENCODINGS.get(self.method, f"int{self.bits}")
        group = self.group or (0 if self.symmetric else ZERO_POINT_GROUP)
        return ExpertFormat(encoding, group, not self.symmetric)

    def stored(self, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        """The tensors of a quantized matrix [out, in] by the last part of their names; the first holds the codes.

        Raises CheckpointError if the columns of the matrix are not whole groups.
        """
        return _STORED[self.method](self, *shape)

    def stored_fused(self, experts: int, rows: int, cols: int) -> dict[str, StoredTensor] | None:
        """The tensors of a layer's fused experts [E, out, in] by what follows their name; None: they can't be fused.

        Raises CheckpointError as `stored`.
        """
        if self.method == FUSED_MXFP4:
            single = self.stored((rows, cols)).items()
            return {f"_{name}": StoredTensor(one.dtypes, (experts, *one.shape)) for name, one in single}
        if self.method != "fp8":
            return None
        codes, scales = self.stored((rows, cols)).values()
        return {
            "": StoredTensor(codes.dtypes, (experts, rows, cols)),
            "_scale_inv": StoredTensor(scales.dtypes, (experts, *scales.shape)),
        }

    def num_groups(self, cols: int) -> int:
        if self.group and cols % self.group:
            raise CheckpointError(f"a quantized matrix has {cols} columns, which are not whole groups of {self.group}")
        return cols // self.group if self.group else 1


@dataclass(frozen=True, slots=True)
class GgufQuantization(Quantization):
    """`experts`: the types of each layer's experts, (gate and up, down)."""

    experts: tuple[tuple[str, str], ...] = ()

    @property
    def description(self) -> str:
        return f"gguf, experts in {', '.join(sorted({kind for layer in self.experts for kind in layer}))}"

    @property
    def expert_format(self) -> ExpertFormat:
        names = sorted({gguf.packed_name(kind) for layer in self.experts for kind in layer})
        return GgufExperts("+".join(names), types=self.experts)


def quantization_of(config: Config) -> Quantization | None:
    """None for a checkpoint that is not quantized.

    Raises UnknownNameError for an unknown method or format, CheckpointError for unsupported parameters of a known one.
    """
    key, settings = next(((key, config[key]) for key in CONFIG_KEYS if config.get(key)), ("", None))
    if settings is None:
        return None
    where = f"config.json: {key}"
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{where} is {settings!r}; expected an object with 'quant_method'")
    method = settings.get("quant_method", "compressed-tensors" if key == "compression_config" else None)
    if not isinstance(method, str) or method not in _READERS:
        raise UnknownNameError("quant_method", str(method), METHODS, where)
    return _READERS[method](settings, where)


def _fp8(settings: Mapping[str, Any], where: str) -> Quantization:
    if settings.get("fmt") is not None:
        _choice(settings, where, "fmt", ("e4m3", "float8_e4m3fn"))  # DeepSeek's and MiniMax's word for the same
    _require(settings, where, "weight_block_size", [FP8_BLOCK, FP8_BLOCK])
    _require(settings, where, "activation_scheme", "dynamic", default="dynamic")
    return Quantization("fp8", 8, FP8_BLOCK)


def _gptq(settings: Mapping[str, Any], where: str) -> Quantization:
    layout = settings.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise UnknownNameError("checkpoint_format", str(layout), ("gptq", "gptq_v2"), where)
    _require(settings, where, "desc_act", False, default=False)
    _require_not(settings, where, "dynamic", "each module must have the same parameters")
    bits, group = _choice(settings, where, "bits", CODE_BITS), _group(settings, where, "group_size")
    return Quantization("gptq", bits, group, _boolean(settings, where, "sym", True), 1 if layout == "gptq" else 0)


def _awq(settings: Mapping[str, Any], where: str) -> Quantization:
    if str(settings.get("version", "gemm")).lower() != "gemm":
        _require(settings, where, "version", "gemm")
    bits, group = _choice(settings, where, "bits", (4,)), _group(settings, where, "group_size")
    _require(settings, where, "zero_point", True, default=True)
    return Quantization("awq", bits, group, symmetric=False)


def _compressed(settings: Mapping[str, Any], where: str) -> Quantization:
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        found = sorted(groups) if isinstance(groups, Mapping) else groups
        raise CheckpointError(f"{where}: 'config_groups' is {found!r}; expected an object with one group")
    name, group = next(iter(groups.items()))
    where_group = f"{where}: config_groups: {name}"
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"{where_group}: 'weights' is {weights!r}; expected an object")
    layout = group.get("format") or settings.get("format")
    if layout in _MICRO_FLOATS:
        return _micro_float(layout, weights, where_group)
    if layout == "naive-quantized":
        kind = _choice(weights, where_group, "type", ("int", "float"))
        layout = f"{kind}-quantized"
    if layout == "float-quantized":
        _require(weights, where_group, "type", "float")
        _require(weights, where_group, "num_bits", 8)
        if _choice(weights, where_group, "strategy", ("channel", "block")) == "channel":
            return Quantization(FLOAT_QUANTIZED, 8, 0)
        _require(weights, where_group, "block_structure", [FP8_BLOCK, FP8_BLOCK])
        return Quantization(FLOAT_QUANTIZED, 8, FP8_BLOCK)
    formats = {"pack-quantized": CODE_BITS, "int-quantized": (8,)}
    if layout not in formats:
        known = (*formats, "float-quantized", "naive-quantized", *_MICRO_FLOATS)
        raise UnknownNameError("compressed-tensors format", str(layout), known, where)
    _require(weights, where_group, "type", "int", default="int")
    _require(weights, where_group, "dynamic", False, default=False)
    if weights.get("actorder") not in (None, False, "weight", "static"):
        _require(weights, where_group, "actorder", None)
    bits = _choice(weights, where_group, "num_bits", formats[layout])
    strategy = _choice(weights, where_group, "strategy", ("group", "channel"))
    columns = _group(weights, where_group, "group_size") if strategy == "group" else 0
    symmetric = _boolean(weights, where_group, "symmetric", True)
    return Quantization(f"compressed-tensors {layout}", bits, columns, symmetric)


def _mxfp4(settings: Mapping[str, Any], where: str) -> Quantization:
    return Quantization(FUSED_MXFP4, 4, MX_GROUP)


_MICRO_FLOATS = {
    "nvfp4-pack-quantized": (NVFP4, 4, "tensor_group", NVFP4_GROUP),
    "mxfp4-pack-quantized": (COMPRESSED_MXFP4, 4, "group", MX_GROUP),
    "mxfp8-quantized": (COMPRESSED_MXFP8, 8, "group", MX_GROUP),
}
"""Format → method, bits, strategy, columns that share a scale."""


def _micro_float(layout: str, weights: Mapping[str, Any], where: str) -> Quantization:
    method, bits, strategy, group = _MICRO_FLOATS[layout]
    wanted = {"type": "float", "num_bits": bits, "strategy": strategy, "group_size": group}
    for key, value in wanted.items():
        _require(weights, where, key, value)
    _require(weights, where, "symmetric", True, default=True)
    return Quantization(method, bits, group)


def _modelopt(settings: Mapping[str, Any], where: str) -> Quantization:
    _require(settings, where, "quant_algo", "NVFP4")
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise CheckpointError(f"{where}: 'config_groups' is {str(groups)[:80]}; expected an object of objects")
    for name, group in groups.items():
        weights = group.get("weights")
        if isinstance(weights, Mapping):
            for key, value in (("num_bits", 4), ("group_size", NVFP4_GROUP)):
                _require(weights, f"{where}: config_groups: {name}", key, value, default=value)
    _require(settings, where, "group_size", NVFP4_GROUP, default=NVFP4_GROUP)
    return Quantization(MODELOPT_NVFP4, 4, NVFP4_GROUP)


def _mxfp8(settings: Mapping[str, Any], where: str) -> Quantization:
    _require(settings, where, "weight_block_size", [1, MX_GROUP], default=[1, MX_GROUP])
    _require(settings, where, "activation_scheme", "dynamic", default="dynamic")
    return Quantization("mxfp8", 8, MX_GROUP)


def _gguf(settings: Mapping[str, Any], where: str) -> Quantization:
    experts = settings.get("experts")
    known = gguf.EXPERT_TYPES
    if not isinstance(experts, list) or not experts:
        raise CheckpointError(f"{where}: 'experts' is {str(experts)[:80]}; expected the types of each layer's experts")
    for layer in experts:
        if not isinstance(layer, list) or len(layer) != 2 or not all(kind in known for kind in layer):
            raise CheckpointError(f"{where}: 'experts' holds {str(layer)[:80]}; expected two of {', '.join(known)}")
    dense = settings.get("dense", {})
    if not isinstance(dense, Mapping) or not all(kind in gguf.DENSE_TYPES for kind in dense.values()):
        raise CheckpointError(
            f"{where}: 'dense' is {str(dense)[:80]}; expected an object of {', '.join(gguf.DENSE_TYPES)} by tensor"
        )
    return GgufQuantization("gguf", 8, 0, experts=tuple((up, down) for up, down in experts))


_READERS: dict[str, Callable[[Mapping[str, Any], str], Quantization]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    FUSED_MXFP4: _mxfp4,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp8": _mxfp8,
    "gguf": _gguf,
}

METHODS = tuple(method for method in _READERS if method != "gguf")


def _stored_fp8(q: Quantization, rows: int, cols: int) -> dict[str, StoredTensor]:
    blocks = (ceil(rows / FP8_BLOCK), ceil(cols / FP8_BLOCK))
    return {
        "weight": StoredTensor(("F8_E4M3",), (rows, cols)),
        "weight_scale_inv": StoredTensor(SCALES, blocks),
    }


def _stored_packed(q: Quantization, rows: int, cols: int) -> dict[str, StoredTensor]:
    per_word, groups = 32 // q.bits, q.num_groups(cols)
    tensors = {
        "weight_packed": StoredTensor(INT32, (rows, ceil(cols / per_word))),
        "weight_scale": StoredTensor(SCALES, (rows, groups)),
        "weight_shape": StoredTensor(("I64", "I32"), (2,)),
    }
    if not q.symmetric:
        tensors["weight_zero_point"] = StoredTensor(INT32, (ceil(rows / per_word), groups))
    return tensors


def _stored_int8(q: Quantization, rows: int, cols: int) -> dict[str, StoredTensor]:
    groups = q.num_groups(cols)
    tensors = {"weight": StoredTensor(("I8",), (rows, cols)), "weight_scale": StoredTensor(SCALES, (rows, groups))}
    if not q.symmetric:
        tensors["weight_zero_point"] = StoredTensor(("I8",), (rows, groups))
    return tensors


def _stored_float(q: Quantization, rows: int, cols: int) -> dict[str, StoredTensor]:
    scales = (ceil(rows / FP8_BLOCK), ceil(cols / FP8_BLOCK)) if q.group else (rows, 1)
    return {"weight": StoredTensor(("F8_E4M3",), (rows, cols)), "weight_scale": StoredTensor(SCALES, scales)}


def _stored_fp4(q: Quantization, rows: int, cols: int) -> dict[str, StoredTensor]:
    codes = StoredTensor(("U8",), (rows, cols // 2))
    scales = StoredTensor(EXPONENTS if q.method == COMPRESSED_MXFP4 else ("F8_E4M3",), (rows, q.num_groups(cols)))
    if q.method == MODELOPT_NVFP4:
        return {"weight": codes, "weight_scale": scales, "weight_scale_2": StoredTensor(("F32",), ())}
    stored = {"weight_packed": codes, "weight_scale": scales}
    return stored if q.method == COMPRESSED_MXFP4 else {**stored, "weight_global_scale": StoredTensor(("F32",), (1,))}


def _stored_mxfp8(q: Quantization, rows: int, cols: int) -> dict[str, StoredTensor]:
    scales = "weight_scale_inv" if q.method == "mxfp8" else "weight_scale"
    codes = StoredTensor(("F8_E4M3",), (rows, cols))
    return {"weight": codes, scales: StoredTensor(EXPONENTS, (rows, q.num_groups(cols)))}


def _stored_gptq(q: Quantization, rows: int, cols: int) -> dict[str, StoredTensor]:
    per_word, groups = 32 // q.bits, q.num_groups(cols)
    return {
        "qweight": StoredTensor(INT32, (ceil(cols / per_word), rows)),
        "scales": StoredTensor(SCALES, (groups, rows)),
        "qzeros": StoredTensor(INT32, (groups, ceil(rows / per_word))),
        "g_idx": StoredTensor(INT32, (cols,), is_optional=True),
    }


def _stored_mxfp4(q: Quantization, rows: int, cols: int) -> dict[str, StoredTensor]:
    """The tensors of one expert's matrix; checkpoints have a layer's experts in one tensor (`stored_fused`)."""
    groups = q.num_groups(cols)
    codes = StoredTensor(("U8",), (rows, groups, MX_GROUP // 2))
    return {"blocks": codes, "scales": StoredTensor(("U8",), (rows, groups))}


def _stored_awq(q: Quantization, rows: int, cols: int) -> dict[str, StoredTensor]:
    per_word, groups = 32 // q.bits, q.num_groups(cols)
    return {
        "qweight": StoredTensor(INT32, (cols, ceil(rows / per_word))),
        "scales": StoredTensor(SCALES, (groups, rows)),
        "qzeros": StoredTensor(INT32, (groups, ceil(rows / per_word))),
    }


_STORED: dict[str, Callable[[Quantization, int, int], dict[str, StoredTensor]]] = {
    "fp8": _stored_fp8,
    "compressed-tensors pack-quantized": _stored_packed,
    "compressed-tensors int-quantized": _stored_int8,
    FLOAT_QUANTIZED: _stored_float,
    **dict.fromkeys((NVFP4, MODELOPT_NVFP4, COMPRESSED_MXFP4), _stored_fp4),
    **dict.fromkeys((COMPRESSED_MXFP8, "mxfp8"), _stored_mxfp8),
    "gptq": _stored_gptq,
    "awq": _stored_awq,
    FUSED_MXFP4: _stored_mxfp4,
}


STORED_PARTS = (
    *("weight", "weight_scale_inv", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point"),
    *("weight_g_idx", "qweight", "scales", "qzeros", "g_idx"),
    *("weight_global_scale", "weight_scale_2", "pre_quant_scale"),
)
"""The last parts of the names of a matrix's tensors, of all methods."""


def _require(settings: Mapping[str, Any], where: str, key: str, value: Any, *, default: Any = None) -> None:
    found = settings.get(key)
    if (default if found is None else found) != value:
        raise CheckpointError(f"{where}: {key!r} is {found!r}; only {value!r} can be used")


def _require_not(settings: Mapping[str, Any], where: str, key: str, reason: str) -> None:
    if settings.get(key):
        raise CheckpointError(f"{where}: {key!r} is {settings[key]!r}; {reason}")


def _choice(settings: Mapping[str, Any], where: str, key: str, allowed: tuple[Any, ...]) -> Any:
    found = settings.get(key)
    if isinstance(found, bool) or found not in allowed:
        raise CheckpointError(f"{where}: {key!r} is {found!r}; allowed: {', '.join(map(str, allowed))}")
    return found


def _group(settings: Mapping[str, Any], where: str, key: str) -> int:
    """The group size; 0 for -1, which means the whole row."""
    found = settings.get(key)
    if not isinstance(found, int) or isinstance(found, bool) or (found != -1 and (found < 1 or found % COLUMN_UNIT)):
        raise CheckpointError(f"{where}: {key!r} is {found!r}; allowed: -1, or a multiple of {COLUMN_UNIT}")
    return max(found, 0)


def _boolean(settings: Mapping[str, Any], where: str, key: str, default: bool) -> bool:
    found = settings.get(key, default)
    if not isinstance(found, bool):
        raise CheckpointError(f"{where}: {key!r} is {found!r}; expected true or false")
    return found


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
