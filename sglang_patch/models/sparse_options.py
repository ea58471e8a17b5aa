"""What models with an indexer (DeepSeek-V3.2, GLM-5) can't be served with.

Symbols: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kt_runtime.errors import InvalidValueError
from kt_runtime.families.base import Family
from kt_runtime.sglang_patch.options import last_value

SYMBOLS: tuple[str, ...] = ()
KV_DTYPE_OPTION = "--kv-cache-dtype"
KEPT_DTYPES = (None, "auto", "bfloat16", "bf16")


class Options(Protocol):
    """`serve.options.named.ServeOptions`."""

    @property
    def passed_on(self) -> Sequence[str]: ...


def refuse_options(options: Options, family: Family, on_cpu: bool) -> None:
    """Raises InvalidValueError for an accelerator, and for a KV cache of another dtype than the model's."""
    if not family.chooses_keys:
        return
    what = f"the queries of {family.name} see the keys that an indexer chooses"
    if not on_cpu:
        raise InvalidValueError(
            f"--device: {what}, which is computed on a CPU only, for serving and training alike; give --device cpu"
        )
    given = last_value(options.passed_on, KV_DTYPE_OPTION)
    if given not in KEPT_DTYPES:
        raise InvalidValueError(
            f"{KV_DTYPE_OPTION} {given}: {what}, and index keys are kept in the model's dtype; leave the option out"
        )
