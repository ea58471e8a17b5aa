"""The types of fields, each with its bounds. Every integer fits into 64 bits with room for arithmetic.

A prompt's text and token ids have no bound of their own: the body's size limit (`body_reader.py`) applies, and the
server compares the number of tokens with the context length after tokenization.
"""

from __future__ import annotations

import ctypes
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

LARGEST_INT32 = 2**31 - 1
MAX_PROMPTS = 1024  # of one request; also prompts times samples of each
MAX_SAMPLES = 128
MAX_TOP_LOGPROBS = 1024  # of /generate
# 20 is OpenAI's bound for chats and responses. For completions OpenAI has 5 and vLLM 20, but clients that distil a
# model ask SGLang for more; there each one is a dict entry, a tenth of the work of a chat's.
MAX_CHAT_TOP_LOGPROBS, MAX_COMPLETION_LOGPROBS = 20, 128
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 32, 1024
BOUNDED_BY_BODY = {"bounded by": "body"}


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that one JSON object may have. `left_out`: unsupported fields, with the reason or an alternative.

    A client may still send an unsupported field as null, false or with its value in `neutral`, since clients write out
    their defaults. `null_is_left_out`: any field may be null, and an unsupported one also an empty list or object.
    """

    left_out: ClassVar[dict[str, str]] = {}
    neutral: ClassVar[dict[str, Any]] = {}
    null_is_left_out: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Leaks one reference to the class: msgspec 0.22 frees some types' fields twice when Python collects the
        classes at exit, which would end the process with a segmentation fault."""
        super().__init_subclass__(**options)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(cls))


Prompt: TypeAlias = Annotated[str, Meta(extra=BOUNDED_BY_BODY)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=LARGEST_INT32)]  # vocabulary: `sglang_patch/frontend/checks.py`
TokenIds: TypeAlias = Annotated[list[TokenId], Meta(extra=BOUNDED_BY_BODY)]
Prompts: TypeAlias = Annotated[list[Prompt], Meta(min_length=1, max_length=MAX_PROMPTS)]
OneOrMorePromptsOfIds: TypeAlias = Annotated[list[TokenId | TokenIds], Meta(extra=BOUNDED_BY_BODY)]

Name: TypeAlias = Annotated[str, Meta(max_length=256)]
# A busy SGLang scheduler drops a request without an answer if its id has the prefix of SGLang's own health checks.
RequestId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256, pattern="^(?!HEALTH_CHECK)")]
RequestIds: TypeAlias = Annotated[list[RequestId], Meta(max_length=MAX_PROMPTS)]
LongName: TypeAlias = Annotated[str, Meta(max_length=4096)]
Label: TypeAlias = Annotated[str, Meta(max_length=64)]
Names: TypeAlias = Annotated[list[Name], Meta(max_length=MAX_PROMPTS)]
NamesOrNull: TypeAlias = Annotated[list[Name | None], Meta(max_length=MAX_PROMPTS)]

Count: TypeAlias = Annotated[int, Meta(ge=0, le=LARGEST_INT32)]
Position: TypeAlias = Annotated[int, Meta(ge=-1, le=LARGEST_INT32)]
Samples: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_SAMPLES)]
TopLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
ChatTopLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_CHAT_TOP_LOGPROBS)]
CompletionLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_COMPLETION_LOGPROBS)]
NewTokens: TypeAlias = Annotated[int, Meta(ge=1, le=LARGEST_INT32)]
Priority: TypeAlias = Annotated[int, Meta(ge=-LARGEST_INT32, le=LARGEST_INT32)]
Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TopK: TypeAlias = Annotated[int, Meta(ge=-1, le=LARGEST_INT32)]

Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=1000)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty: TypeAlias = Annotated[float, Meta(gt=0, le=2)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=86_400)]
Bias: TypeAlias = Annotated[float, Meta(ge=-1e9, le=1e9)]

StopString: TypeAlias = Annotated[str, Meta(max_length=MAX_STOP_CHARACTERS)]
Stop: TypeAlias = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
FewTokenIds: TypeAlias = Annotated[list[TokenId], Meta(max_length=1024)]
LogprobTokenIds: TypeAlias = Annotated[list[TokenId | FewTokenIds], Meta(max_length=1024)]
LogitBias: TypeAlias = Annotated[
    dict[Annotated[str, Meta(pattern=r"^\d{1,10}$", max_length=10)], Bias], Meta(max_length=1024)
]

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"] | Share
