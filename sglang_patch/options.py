"""SGLang's options: as the user writes them on the command line, and values that kt-runtime gives them."""

from __future__ import annotations

from collections.abc import Sequence

ATTENTION_BACKEND = "kt_cpu"
ACCELERATOR_ATTENTION = "torch_native"
"""Values of SGLang's `--attention-backend`: kt-runtime's on a CPU, and SGLang's on an accelerator without CUDA."""


def last_value(arguments: Sequence[str], option: str) -> str | None:
    """The last value given to an option."""
    found = None
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == option:
            found = value if equals else "".join(arguments[position + 1 : position + 2])
    return found
