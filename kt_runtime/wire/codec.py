"""Encodes messages as ZMQ frames and decodes them: a magic, a msgpack header, array descriptors, the arrays' raw bytes.

    frame 0    b"KT1"
    frame 1    the message (messages.py) as a msgpack map
    frame 2    msgpack list of {"name", "dtype", "shape"}, one for each array
    frame 3..  the arrays in that order: C order, little endian, no padding

Received bytes are untrusted. Every size is compared with a limit before use, an array frame's length must equal its
shape times the item size, and each message type fixes which arrays it carries. The codec executes nothing and looks up
no class by a name from the wire; a pickle is just a malformed message. docs/protocol.md has a worked example.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kt_runtime.errors import ProtocolError
from kt_runtime.wire.messages import (
    PROTOCOL_VERSION,
    AnyRequest,
    Forward,
    ForwardBackward,
    MoveName,
    PolicyLoss,
    PreferenceLoss,
    Request,
)
from kt_runtime.wire.replies import AnyReply, ForwardReply, Reply

MAGIC = b"KT1"
NUM_LEADING_FRAMES = 3
MEBIBYTE = 1 << 20

Arrays = Mapping[str, npt.NDArray[Any]]
DTYPES: dict[str, np.dtype[Any]] = {"int32": np.dtype("<i4"), "float32": np.dtype("<f4")}

# The arrays of each message type: name -> dtype, all one-dimensional. Other types carry none.
ARRAYS_OF: dict[type, dict[str, str]] = {
    Forward: {"tokens": "int32", "targets": "int32", "weights": "float32"},
    ForwardBackward: {"tokens": "int32", "targets": "int32", "weights": "float32"},
    ForwardReply: {"logprobs": "float32"},
}
# Additional arrays of some losses, see `arrays_of`: one number per sequence, and one per token.
PER_SEQUENCE = {"reference": "float32"}
OF_SAMPLES = {"sampled": "float32", "advantages": "float32"}


@dataclass(frozen=True)
class Limits:
    """Size limits of one message. `max_message_bytes` bounds the sum of all frames."""

    max_message_bytes: int = 256 * MEBIBYTE
    max_header_bytes: int = MEBIBYTE
    max_frames: int = 16


class FrameError(ProtocolError):
    """`fault` is the kind of violation in one word."""

    def __init__(self, fault: str, message: str) -> None:
        self.fault = fault
        super().__init__(message)


class ArrayDescriptor(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    dtype: Literal["int32", "float32"]
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1, max_length=8)]


class _Envelope(msgspec.Struct):
    """The fields that can be read from a message even if the rest is malformed."""

    version: Any = None
    request_id: Any = None


_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_decode_descriptors = msgspec.msgpack.Decoder(list[ArrayDescriptor]).decode
_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_decode_request = msgspec.msgpack.Decoder(AnyRequest).decode
_decode_move = msgspec.msgpack.Decoder(MoveName).decode
_decode_reply = msgspec.msgpack.Decoder(AnyReply).decode

# msgspec's exceptions for bytes that are not the expected message (UnicodeDecodeError is a ValueError).
_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)


def encode(message: Request | Reply, arrays: Arrays | None = None, limits: Limits | None = None) -> list[bytes]:
    """The frames of `message`. Arrays are copied: the caller may reuse them at once.

    Raises ProtocolError for a message that the receiver would reject: an array that is missing, unknown or of another
    dtype, a non-finite number, a size above a limit.
    """
    limits = limits or Limits()
    arrays = arrays or {}
    _check_finite(message, type(message).__name__)
    _check_arrays(message, arrays)
    descriptors = [ArrayDescriptor(name, _dtype_name(name, array), list(array.shape)) for name, array in arrays.items()]
    buffers = [
        np.ascontiguousarray(array, DTYPES[d.dtype]).tobytes()
        for d, array in zip(descriptors, arrays.values(), strict=True)
    ]
    frames = [MAGIC, _encode_header(message), _encoder.encode(descriptors), *buffers]
    check_sizes(frames, limits)
    return frames


def _encode_header(message: Request | Reply) -> bytes:
    try:
        return _encoder.encode(message)
    except (TypeError, ValueError, OverflowError) as error:  # a NumPy scalar, a lone surrogate, an integer of 65 bits
        raise FrameError("malformed", f"{type(message).__name__}: {str(error)[:300]}") from None


def decode_request(frames: Sequence[bytes], limits: Limits | None = None) -> tuple[AnyRequest, dict[str, np.ndarray]]:
    """The request and its arrays, read-only views of `frames`. Raises FrameError, a ProtocolError, on any violation."""
    return _decode(frames, limits or Limits(), _decode_request)


def decode_move(frames: Sequence[bytes], limits: Limits | None = None) -> tuple[MoveName, dict[str, np.ndarray]]:
    """As `decode_request`, for the frontend's server."""
    return _decode(frames, limits or Limits(), _decode_move)


def decode_reply(frames: Sequence[bytes], limits: Limits | None = None) -> tuple[AnyReply, dict[str, np.ndarray]]:
    """As `decode_request`, for the server's replies."""
    return _decode(frames, limits or Limits(), _decode_reply)


def check_sizes(frames: Sequence[bytes], limits: Limits) -> None:
    """Raises FrameError if `frames` are too few, too many or too large; checks lengths only, not contents."""
    if not NUM_LEADING_FRAMES <= len(frames) <= limits.max_frames:
        raise FrameError(
            "frames", f"a message of {len(frames)} frames; allowed are {NUM_LEADING_FRAMES} to {limits.max_frames}"
        )
    for position in (1, 2):
        if len(frames[position]) > limits.max_header_bytes:
            raise FrameError(
                "oversized",
                f"frame {position} has {len(frames[position])} bytes; at most {limits.max_header_bytes} are allowed",
            )
    total_bytes = sum(map(len, frames))
    if total_bytes > limits.max_message_bytes:
        raise FrameError(
            "oversized", f"a message of {total_bytes} bytes; at most {limits.max_message_bytes} are allowed"
        )


def _decode(frames: Sequence[bytes], limits: Limits, decode_header: Any) -> tuple[Any, dict[str, np.ndarray]]:
    check_sizes(frames, limits)
    if frames[0] != MAGIC:
        raise FrameError("magic", f"frame 0 is {bytes(frames[0][:16])!r}; it must be {MAGIC!r}")
    envelope = _parse(_decode_envelope, frames[1], "frame 1 (message)")
    if decode_header is not _decode_reply and envelope.version != PROTOCOL_VERSION:
        raise FrameError(
            "version",
            f"frame 1 (message): protocol version {envelope.version!r:.40}; this side speaks {PROTOCOL_VERSION}",
        )
    message = _parse(decode_header, frames[1], "frame 1 (message)")
    _check_finite(message, type(message).__name__)
    descriptors = _parse(_decode_descriptors, frames[2], "frame 2 (array descriptors)")
    arrays = _read_arrays(descriptors, frames)
    _check_arrays(message, arrays)
    return message, arrays


def request_id_of(header: bytes) -> str:
    """The request id in a message's header, "" if none can be read."""
    try:
        request_id = _decode_envelope(header).request_id
    except _DECODE_ERRORS:
        return ""
    return request_id if isinstance(request_id, str) and len(request_id) <= 128 else ""


def _parse(decode: Any, frame: bytes, where: str) -> Any:
    try:
        return decode(frame)
    except _DECODE_ERRORS as error:
        raise FrameError("malformed", f"{where}: {str(error)[:300]}") from None


def _read_arrays(descriptors: list[ArrayDescriptor], frames: Sequence[bytes]) -> dict[str, np.ndarray]:
    if len(descriptors) != len(frames) - NUM_LEADING_FRAMES:
        raise FrameError(
            "arrays",
            f"frame 2 describes {len(descriptors)} arrays, but {len(frames) - NUM_LEADING_FRAMES} frames follow it",
        )
    arrays: dict[str, np.ndarray] = {}
    for position, descriptor in enumerate(descriptors, start=NUM_LEADING_FRAMES):
        where = f"frame {position} (array {descriptor.name!r})"
        dtype = DTYPES[descriptor.dtype]
        wanted_bytes = math.prod(descriptor.shape) * dtype.itemsize
        if descriptor.name in arrays:
            raise FrameError("arrays", f"{where}: a second array of this name")
        if len(frames[position]) != wanted_bytes:
            raise FrameError(
                "arrays",
                f"{where}: {len(frames[position])} bytes; {descriptor.dtype} {descriptor.shape} takes {wanted_bytes}",
            )
        array = np.frombuffer(frames[position], dtype)
        try:
            arrays[descriptor.name] = array.reshape(descriptor.shape)
        except (ValueError, OverflowError):  # such as [0, 2**63]: zero elements, but a size that numpy can't hold
            raise FrameError("arrays", f"{where}: impossible shape {descriptor.shape}") from None
    return arrays


def arrays_of(message: Request | Reply) -> dict[str, str]:
    """Names and dtypes of the arrays that `message` carries."""
    wanted = ARRAYS_OF.get(type(message), {})
    if not isinstance(message, Forward | ForwardBackward):
        return wanted
    if isinstance(message.loss, PolicyLoss):
        return wanted | OF_SAMPLES
    if isinstance(message.loss, PreferenceLoss):
        is_policy = isinstance(message, ForwardBackward) or message.model == "policy"
        if message.loss.has_reference and is_policy:
            return wanted | PER_SEQUENCE
    return wanted


def _dtype_name(name: str, array: npt.NDArray[Any]) -> Any:
    for known, dtype in DTYPES.items():
        if array.dtype == dtype:
            return known
    raise FrameError("arrays", f"array {name!r} has dtype {array.dtype}; allowed are {', '.join(DTYPES)}")


def _check_arrays(message: Request | Reply, arrays: Arrays) -> None:
    """Raises FrameError unless `arrays` are exactly those of `message`: flat, finite, as long as `lengths` require."""
    where, wanted = type(message).__name__, arrays_of(message)
    if set(arrays) != set(wanted):
        raise FrameError(
            "arrays",
            f"{where}: arrays {sorted(arrays)}; this message carries {sorted(wanted) or 'none'}",
        )
    for name, array in arrays.items():
        problem = _length_problem(name, len(array), message) if array.ndim == 1 else None
        if array.dtype != DTYPES[wanted[name]]:
            problem = f"dtype {array.dtype}; it must be {wanted[name]}"
        elif array.ndim != 1:
            problem = f"shape {list(array.shape)}; it must be one-dimensional"
        elif problem is None and array.dtype.kind == "f" and not np.isfinite(array).all():
            first = int(np.argmin(np.isfinite(array)))
            raise FrameError("nonfinite", f"{where}: {name}[{first}] is {array[first]}; numbers must be finite")
        if problem:
            raise FrameError("arrays", f"{where}: array {name!r} has {problem}")


def _length_problem(name: str, length: int, message: Request | Reply) -> str | None:
    if not isinstance(message, Forward | ForwardBackward):
        return None
    if name in PER_SEQUENCE:
        wanted, why = len(message.lengths), f"there are {len(message.lengths)} sequences"
    else:
        wanted = sum(message.lengths)
        why = f"the lengths add up to {wanted}"
    return None if length == wanted else f"{length} elements, but {why}"


def _check_finite(value: Any, where: str) -> None:
    """Raises FrameError for NaN or infinity anywhere in a message's fields: msgpack can encode them, no message may."""
    if isinstance(value, float) and not math.isfinite(value):
        raise FrameError("nonfinite", f"{where} is {value}; numbers must be finite")
    if isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            _check_finite(getattr(value, field), f"{where}.{field}")
    elif isinstance(value, list) and value and isinstance(value[0], msgspec.Struct):
        for index, item in enumerate(value):
            _check_finite(item, f"{where}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_finite(item, f"{where}[{key!r}]")
