"""The parameters of a run, and the cases that it measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kt_runtime.bench.options import PRESET, check_dtype, check_number
from kt_runtime.bench.serve.gguf.mix import check_mix
from kt_runtime.errors import InvalidValueError, NotFoundError
from kt_runtime.families.base import integer

PREFILL: Literal["prefill"] = "prefill"
DECODE: Literal["decode"] = "decode"

SPARE_TOKENS = 16  # of a sequence: the answer's first token, and the few that SGLang keeps free
MOST_STREAMS = 256  # llama.cpp's largest number of sequences


@dataclass(frozen=True)
class Sizes:
    """The defaults of the options that were not given."""

    prefill: tuple[int, ...]
    streams: tuple[int, ...]
    runs: int


FULL = Sizes(prefill=(512, 2048, 8192), streams=(1, 4, 8, 16, 32), runs=3)
QUICK = Sizes(prefill=(512,), streams=(1, 4), runs=1)


@dataclass(frozen=True)
class Case:
    """`size`: the prompt's tokens (prefill), or the streams (decode). `adapters`: each stream has its own adapter."""

    kind: Literal["prefill", "decode"]
    size: int
    adapters: bool = False

    @property
    def unit(self) -> str:
        return "tokens" if self.kind == PREFILL else "streams"

    def __str__(self) -> str:
        return f"{self.kind}, {self.size} {self.unit}{', an adapter each' if self.adapters else ''}"


@dataclass(frozen=True)
class Plan:
    """`model`: a preset that can be made, or a checkpoint's directory. `prefill`, `streams`: None: the default sizes.

    A stream of a decode case has a prompt of `prompt_tokens` and an answer of `new_tokens`. `rank`: of the adapters,
    which are on all of the family's LoRA targets. `dtype`: of the server and of Hugging Face; None: the faster one on
    this machine. `with_sglang`: also a server without the native step. `peer`: a Python interpreter with
    llama-cpp-python. `gguf`: the server and llama.cpp read one GGUF file of this mix of types (`quantized.mix.MIXES`);
    Hugging Face, which can't read its experts, is left out.
    """

    model: str = PRESET
    prefill: tuple[int, ...] | None = None
    streams: tuple[int, ...] | None = None
    prompt_tokens: int = 128
    new_tokens: int = 64
    runs: int = FULL.runs
    with_adapters: bool = True
    rank: int = 16
    dtype: str | None = None
    with_sglang: bool = True
    with_hugging_face: bool = True
    peer: Path | None = None
    gguf: str | None = None
    default_sizes: Sizes = FULL

    def __post_init__(self) -> None:
        """Raises InvalidValueError for a number out of range, UnknownNameError for an unknown dtype or mix, and
        NotFoundError for a peer that is no file."""
        for name in ("prompt_tokens", "runs", "rank"):
            check_number(name, getattr(self, name))
        check_number("new_tokens", self.new_tokens, 4)  # a rate needs two tokens while all other streams decode
        for tokens in self.prefill or ():
            check_number("prefill", tokens)
        for streams in self.streams or ():
            check_number("streams", streams, 1, MOST_STREAMS)
        check_dtype(self.dtype)
        if self.gguf is not None:
            check_mix(self.gguf)
        if self.peer is not None and not self.peer.is_file():
            raise NotFoundError(
                f"--peer {self.peer}: no such file; expected a Python interpreter with llama-cpp-python"
            )

    def cases(self, config: Mapping[str, Any]) -> list[Case]:
        """Prefill, then decode of the base, then decode with adapters. Default prompts that exceed the model's context
        are left out; raises InvalidValueError for given ones."""
        context = integer(config, "max_position_embeddings")
        most = context - SPARE_TOKENS
        if self.prefill is not None and max(self.prefill, default=0) > most:
            raise InvalidValueError(
                f"--prefill is {max(self.prefill)}; {self.model} has a context of {context} tokens, which allows {most}"
            )
        if self.stream_tokens > most:
            raise InvalidValueError(
                f"--prompt-tokens {self.prompt_tokens} and --new-tokens {self.new_tokens} are {self.stream_tokens} "
                f"tokens; {self.model} has a context of {context} tokens, which allows {most}"
            )
        prefill = self.default_sizes.prefill if self.prefill is None else self.prefill
        streams = self.default_sizes.streams if self.streams is None else self.streams
        return [
            *(Case(PREFILL, tokens) for tokens in sorted(set(prefill)) if tokens <= most),
            *(Case(DECODE, count) for count in sorted(set(streams))),
            *(Case(DECODE, count, adapters=True) for count in sorted(set(streams)) if self.with_adapters),
        ]

    @property
    def has_hugging_face(self) -> bool:
        return self.with_hugging_face and self.gguf is None

    @property
    def stream_tokens(self) -> int:
        return self.prompt_tokens + self.new_tokens

    def context_tokens(self, cases: list[Case]) -> int:
        """The longest sequence of the cases, with room for SGLang."""
        return max([self.stream_tokens, *(case.size for case in cases if case.kind == PREFILL)]) + SPARE_TOKENS

    def most_streams(self, cases: list[Case], *, adapters: bool = False) -> int:
        """The largest number of streams; `adapters`: of those with an adapter each. 0: there are none."""
        counts = (case.size for case in cases if case.kind == DECODE and (case.adapters or not adapters))
        return max(counts, default=0)
