"""The parameters of a measurement: the model, the sizes, the number of rounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kt_runtime.bench.options import PRESET, check_dtype, check_number
from kt_runtime.errors import InvalidValueError

# Sources of a first token's prefix, in the order of measurement.
SOURCES = ("cold", "device", "host", "disk", "disk_after_restart")


@dataclass(frozen=True)
class Plan:
    """`model`: a preset that can be made, or a checkpoint's directory. `tokens`: of the prefix, whole pages.

    `directory`: for the measured files and the cache, None: the directory for temporary files. `dtype`: None: the
    faster one on this machine. `rounds`: of every measurement. `bandwidth_bytes`: written and read in a round.
    """

    model: str = PRESET
    tokens: int = 2048
    page_tokens: int = 64
    rounds: int = 5
    bandwidth_bytes: int = 256 << 20
    directory: Path | None = None
    dtype: str | None = None
    with_server: bool = True

    def __post_init__(self) -> None:
        """Raises InvalidValueError for a number out of range, UnknownNameError for an unknown dtype."""
        for name in ("page_tokens", "rounds", "bandwidth_bytes"):
            check_number(name, getattr(self, name))
        if self.tokens < self.page_tokens or self.tokens % self.page_tokens:
            raise InvalidValueError(
                f"--tokens is {self.tokens}; must be a multiple of --page-tokens, which is {self.page_tokens}: "
                "only whole pages are cached"
            )
        if self.directory is not None and not self.directory.is_dir():
            raise InvalidValueError(f"--directory {self.directory}: must be a directory that is there")
        check_dtype(self.dtype)
