"""What this machine can do at most (csrc/kernels/peaks.h), for `kt-runtime bench`. Each call takes a second or less."""

from __future__ import annotations

from kt_runtime import _experts
from kt_runtime.experts.native import resolve_isa, translated_errors


def usable_processors() -> int:
    """That this process may run on."""
    return _experts.default_num_threads()


def read_rate(isa: str, num_threads: int, buffer_bytes: int) -> float:
    """Bytes a second that the threads read together from a buffer; the best of many passes.

    It must be much larger than the caches: each pass reads an eighth of it. InvalidValueError where it is too small;
    UnknownNameError for an instruction set that is not available.
    """
    isa = resolve_isa(isa)
    with translated_errors():
        return _experts.measure_read(isa, num_threads, buffer_bytes)


def peak_rate(isa: str, operation: str, num_threads: int) -> float:
    """Operations a second, two for a multiply-add, of the arithmetic that the kernels of `isa` rest on.

    operation: "bf16" for bf16 and fp8 weights, "int8" for integer weights.
    """
    isa = resolve_isa(isa)
    with translated_errors():
        return _experts.measure_peak(isa, operation, num_threads)
