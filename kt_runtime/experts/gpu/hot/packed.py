"""Matrices in the expert store's packed layout (csrc/kernels/layout.h), dequantized on a device by PyTorch's operators.

The bytes are those that the store multiplies: a checkpoint's codes and scales, in blocks of 16 rows. A block is

    row scales | group scales | zeros or minima | factors of byte scales | ... of byte minima | lines of codes

and a weight is

    row_scale * (group_scale * (code - zero) - minimum)

in float32, in the order in which the store's own `unpack` computes it, rounded once to the dtype that is asked for. If
groups have scales too, the row scale is a power of two, so that its product with them is exact: the factors of groups
are computed first, and each weight is one product. (The row scale of nvfp4 is any number: there a weight may differ by
one rounding.)

Axes: n matrices, B blocks, R = 16 rows of a block, G groups of columns, L lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kt_runtime.errors import InvalidValueError

BLOCK_ROWS, COLUMN_UNIT, LINE_BYTES, SUPER_COLUMNS = 16, 32, 64, 256  # csrc/kernels/layout.h
MOST_WEIGHTS_AT_ONCE = 8 << 20
TEMPORARY_BYTES = 12
"""Most bytes that dequantizing a weight takes in addition to its codes and its result."""

_NAME = re.compile(r"(bf16|fp8_e4m3|mxfp8|int8|int4|int5|int6|mxfp4|nvfp4|iq4)(k?)(?:_g(\d+))?(_zp)?")
# csrc/kernels/format.h: kIq4Levels - 127.
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_ZEROS = {"int8": 128, "int4": 8, "int5": 16, "int6": 32}
_NIBBLE_LINES = {"int4": 1, "mxfp4": 1, "nvfp4": 1, "iq4": 1, "int5": 4, "int6": 2}  # lines of a unit
_HIGH_BITS = {"int5": 1, "int6": 2}
_FP8, _FP4, _EXPONENTS = ("fp8_e4m3", "mxfp8"), ("mxfp4", "nvfp4"), ("mxfp4", "mxfp8")
_BITS = {"bf16": 16, "int8": 8, "int5": 5, "int6": 6, "int4": 4, "iq4": 4} | dict.fromkeys(_FP8, 8)
_BITS |= dict.fromkeys(_FP4, 4)


@dataclass(frozen=True)
class PackedFormat:
    """csrc/kernels/format.h. `group`: columns that share a scale, 0: a row has one. `by_byte`: scales of groups, and
    minima, are bytes times a factor for 256 columns."""

    encoding: str
    group: int
    by_byte: bool
    zero_points: bool

    @property
    def has_minima(self) -> bool:
        return self.by_byte and self.encoding in ("int4", "int5")


def packed_format(name: str) -> PackedFormat | None:
    """The format with a name such as "int4_g32" (csrc/kernels/format.cpp); None if it can't be dequantized here."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    encoding, by_byte, group, zero_points = found.groups()
    return PackedFormat(encoding, int(group or 0), bool(by_byte), bool(zero_points))


def formats_of(name: str) -> tuple[PackedFormat, PackedFormat] | None:
    """The formats of gate and up, and of down, from `ExpertLayer.format`: one name, or two joined by "+"."""
    first, _, second = name.partition("+")
    known = packed_format(first), packed_format(second or first)
    return None if known[0] is None or known[1] is None else (known[0], known[1])


@dataclass(frozen=True)
class PackedMatrix:
    """Where the parts of a packed matrix [rows, cols] lie."""

    rows: int
    cols: int
    format: PackedFormat

    @property
    def num_bytes(self) -> int:
        return self._blocks * self._block_bytes

    def dequantize(self, held: Tensor, chosen: Tensor, out: Tensor) -> None:
        """out[i] = the matrix `held[chosen[i]]`.

        held uint8 [S, num_bytes], rows may lie apart; chosen int64 [n]; out [n, rows, cols], bfloat16 or float32. All
        on one device. At most MOST_WEIGHTS_AT_ONCE weights, or a block of each matrix, are computed at once.
        """
        blocks = held.unflatten(1, (self._blocks, self._block_bytes))
        step = max(1, MOST_WEIGHTS_AT_ONCE // (len(chosen) * BLOCK_ROWS * self._padded_cols))
        for first in range(0, self._blocks, step):
            some = blocks[:, first : first + step].index_select(0, chosen)
            row = first * BLOCK_ROWS
            self._dequantize_blocks(some, out[:, row : min(self.rows, row + step * BLOCK_ROWS)])

    def _dequantize_blocks(self, blocks: Tensor, out: Tensor) -> None:
        """blocks [n, B, bytes] -> out [n, rows, cols]."""
        padded = (*blocks.shape[:2], BLOCK_ROWS, self._padded_cols)
        if (out.shape[1], out.shape[2]) == (padded[1] * BLOCK_ROWS, padded[3]):
            self._write(blocks, out.unflatten(1, (-1, BLOCK_ROWS)))
            return
        whole = torch.empty(padded, dtype=out.dtype, device=out.device)
        self._write(blocks, whole)
        out.copy_(whole.flatten(1, 2)[:, : out.shape[1], : out.shape[2]])

    def _write(self, blocks: Tensor, out: Tensor) -> None:
        """out [n, B, R, padded columns]."""
        lines = blocks[..., self._line_offset :]
        if self.format.encoding == "bf16":
            pairs = lines.view(torch.bfloat16).unflatten(-1, (-1, BLOCK_ROWS, 2))
            out.copy_(pairs.transpose(2, 3).flatten(3))
            return
        row_scales = blocks[..., : 4 * BLOCK_ROWS].view(torch.float32)
        levels = self._levels(blocks, lines)
        factors = self._group_factors(blocks)
        if not self.format.has_minima:
            factors = row_scales[..., None] if factors is None else factors * row_scales[..., None]
            _multiply(levels, factors, self._group, out)
            return
        assert factors is not None
        values = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        _multiply(levels, factors, self._group, values)
        for columns, own in _by_group(values, self._minima(blocks), self._group):
            columns.sub_(own)
        torch.mul(values, row_scales[..., None], out=out)

    def _levels(self, blocks: Tensor, lines: Tensor) -> Tensor:
        """[n, B, R, padded columns]: code - zero, exact."""
        encoding = self.format.encoding
        if encoding in _FP8:
            # Byte 16 * (r / 4) + 8 * (col % 4 / 2) + 2 * (r % 4) + col % 2 of line col / 4.
            quarters = lines.unflatten(-1, (-1, 4, 2, 4, 2)).permute(0, 1, 3, 5, 2, 4, 6)
            return quarters.reshape(self._padded(blocks)).view(torch.float8_e4m3fn).to(torch.float32)
        if encoding == "int8":
            codes = lines.unflatten(-1, (-1, BLOCK_ROWS, 4)).transpose(2, 3).reshape(self._padded(blocks))
        else:
            codes = self._nibbles(blocks, lines)
        if encoding in _FP4:
            return _fp4_levels(codes)
        if encoding == "iq4":
            return _iq4_values(codes)
        if not self.format.zero_points:
            return codes if self.format.has_minima else codes.sub_(_ZEROS[encoding]).view(torch.int8)
        zeros = _by_rows(self._part(blocks, self._zero_offset, self._groups * BLOCK_ROWS))
        signed = codes.to(torch.int16)
        for columns, own in _by_group(signed, zeros.to(torch.int16), self._group):
            columns.sub_(own)
        return signed

    def _nibbles(self, blocks: Tensor, lines: Tensor) -> Tensor:
        """uint8 [n, B, R, padded columns]: codes of 4 bits, with their high bits if there are any."""
        num_lines, high_bits = _NIBBLE_LINES[self.format.encoding], _HIGH_BITS.get(self.format.encoding, 0)
        units = lines.unflatten(-1, (-1, num_lines + bool(high_bits), BLOCK_ROWS, 4))  # [n, B, units, lines, R, 4]
        size = (*blocks.shape[:2], BLOCK_ROWS, units.shape[2], num_lines, 2, 4)
        codes = torch.empty(size, dtype=torch.uint8, device=blocks.device)
        low = units[:, :, :, :num_lines].permute(0, 1, 4, 2, 3, 5)
        codes[..., 0, :] = low & 15
        codes[..., 1, :] = low >> 4
        if high_bits:
            high = units[:, :, :, num_lines].transpose(2, 3)  # [n, B, R, units, 4]
            for step, of_step in enumerate(codes.flatten(4, 5).unbind(4)):
                of_step.bitwise_or_((high >> (high_bits * step) & ((1 << high_bits) - 1)) << 4)
        return codes.view(self._padded(blocks))

    def _group_factors(self, blocks: Tensor) -> Tensor | None:
        """float32 [n, B, R or 1, G], or None where a row has one scale."""
        if not self.format.group:
            return None
        at = self._row_scale_bytes
        if self.format.encoding == "fp8_e4m3":
            return self._part(blocks, at, 4 * self._groups).view(torch.float32)[:, :, None]
        if self.format.encoding in _EXPONENTS:
            exponents = _by_rows(self._part(blocks, at, self._groups * BLOCK_ROWS))
            return (exponents.to(torch.int32) << 23).view(torch.float32)
        if self.format.encoding == "nvfp4":
            scales = self._part(blocks, at, self._groups * BLOCK_ROWS).view(torch.float8_e4m3fn)
            return _by_rows(scales.to(torch.float32))
        if self.format.by_byte:
            scales = _by_rows(self._part(blocks, at, self._groups * BLOCK_ROWS).view(torch.int8))
            return scales.to(torch.float32) * self._supers(blocks, self._super_offset)
        return _by_rows(self._part(blocks, at, 2 * self._groups * BLOCK_ROWS).view(torch.float16)).to(torch.float32)

    def _minima(self, blocks: Tensor) -> Tensor:
        """float32 [n, B, R, G]."""
        codes = _by_rows(self._part(blocks, self._zero_offset, self._groups * BLOCK_ROWS)).to(torch.float32)
        return codes * self._supers(blocks, self._super_offset + self._super_bytes)

    def _supers(self, blocks: Tensor, at: int) -> Tensor:
        """float32 [n, B, R, G]: of each group the factor of its 256 columns."""
        halves = _by_rows(self._part(blocks, at, 2 * self._num_supers * BLOCK_ROWS).view(torch.float16))
        return halves.to(torch.float32).repeat_interleave(SUPER_COLUMNS // self._group, 3)[..., : self._groups]

    def _padded(self, blocks: Tensor) -> tuple[int, int, int, int]:
        return blocks.shape[0], blocks.shape[1], BLOCK_ROWS, self._padded_cols

    @staticmethod
    def _part(blocks: Tensor, at: int, num_bytes: int) -> Tensor:
        return blocks[..., at : at + num_bytes]

    # Sizes of a block.

    @cached_property
    def _blocks(self) -> int:
        return -(-self.rows // BLOCK_ROWS)

    @cached_property
    def _padded_cols(self) -> int:
        return _round_up(self.cols, COLUMN_UNIT)

    @cached_property
    def _group(self) -> int:
        return self.format.group or self._padded_cols

    @cached_property
    def _groups(self) -> int:
        return -(-self._padded_cols // self._group)

    @cached_property
    def _num_supers(self) -> int:
        return -(-self._padded_cols // SUPER_COLUMNS)

    @cached_property
    def _row_scale_bytes(self) -> int:
        return 0 if self.format.encoding == "bf16" else 4 * BLOCK_ROWS

    @cached_property
    def _zero_offset(self) -> int:
        """Offset of the zeros, after the scales of groups: fp8 has one scale for a group in a block of rows, others one
        for each row and group."""
        if not self.format.group:
            return self._row_scale_bytes
        by_row = 1 if self.format.by_byte or self.format.encoding in (*_EXPONENTS, "nvfp4") else 2
        each = 4 if self.format.encoding == "fp8_e4m3" else by_row * BLOCK_ROWS
        return self._row_scale_bytes + _round_up(self._groups * each, LINE_BYTES)

    @cached_property
    def _super_offset(self) -> int:
        has_zeros = self.format.zero_points or self.format.has_minima
        return self._zero_offset + (_round_up(self._groups * BLOCK_ROWS, LINE_BYTES) if has_zeros else 0)

    @cached_property
    def _super_bytes(self) -> int:
        return _round_up(2 * self._num_supers * BLOCK_ROWS, LINE_BYTES) if self.format.by_byte else 0

    @cached_property
    def _line_offset(self) -> int:
        return self._super_offset + self._super_bytes * (2 if self.format.has_minima else 1)

    @cached_property
    def _block_bytes(self) -> int:
        return self._line_offset + self._padded_cols * BLOCK_ROWS * _BITS[self.format.encoding] // 8


def _fp4_levels(codes: Tensor) -> Tensor:
    """int8: twice the value of codes of e2m1 (OCP Microscaling formats, 1.0), without a table, whose copy to the device
    would be a wait: 0 1 2 3 4 6 8 12 and their negatives."""
    magnitude = codes & 7
    exponent = (magnitude.clamp(min=2) >> 1) - 1
    level = torch.where(magnitude < 2, magnitude, ((magnitude & 1) | 2) << exponent).view(torch.int8)
    return torch.where(codes > 7, -level, level)


def _iq4_values(codes: Tensor) -> Tensor:
    """int8: the values of GGUF's IQ4 types, without a table as above."""
    values = torch.full_like(codes, _IQ4[0], dtype=torch.int8)
    for code, value in enumerate(_IQ4[1:], 1):
        values.masked_fill_(codes == code, value)
    return values


def _by_rows(values: Tensor) -> Tensor:
    """[n, B, G * R] -> [n, B, R, G]."""
    return values.unflatten(-1, (-1, BLOCK_ROWS)).transpose(2, 3)


def _by_group(values: Tensor, factors: Tensor, group: int) -> list[tuple[Tensor, Tensor]]:
    """Views of `values` [..., columns] with the numbers of `factors` [..., G] that go with them. The last group may be
    shorter than the others."""
    columns = values.shape[-1]
    whole = columns // group
    pairs = []
    if whole:
        pairs.append((values[..., : whole * group].unflatten(-1, (whole, group)), factors[..., :whole, None]))
    if whole * group < columns:
        pairs.append((values[..., whole * group :], factors[..., whole:]))
    return pairs


def _multiply(levels: Tensor, factors: Tensor, group: int, out: Tensor) -> None:
    """out = levels * the factor of each one's group: a float32 product, rounded once to out's dtype."""
    targets = [target for target, _ in _by_group(out, factors, group)]
    for (some, own), target in zip(_by_group(levels, factors, group), targets, strict=True):
        torch.mul(some, own, out=target)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def known_formats(names: list[str]) -> list[tuple[PackedFormat, PackedFormat]]:
    """Raises InvalidValueError for one that can't be dequantized on a device."""
    known = [formats_of(name) for name in names]
    for name, formats in zip(names, known, strict=True):
        if formats is None:
            raise InvalidValueError(
                f"--gpu-experts-format published: experts in {name!r} can't be dequantized on the GPU; allowed: model"
            )
    return [formats for formats in known if formats is not None]
