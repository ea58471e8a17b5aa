"""How large a request's body may be. Decided before the first byte is read.

    largest body = 1 MiB + 64 bytes × context length

A prompt takes at most some 16 bytes a token, as text with its escapes or as token ids with their commas; the body may
hold four prompts of full length, or as many shorter ones as fit. The 1 MiB is for what is no prompt: tools, schemas,
stop strings, each of which has a bound of its own. Qwen3-30B-A3B (40,960 tokens) comes to 3.5 MiB, DeepSeek-V3
(163,840) to 11 MiB.
"""

from __future__ import annotations

FIXED_BYTES = 1024 * 1024
BYTES_PER_TOKEN = 16
FULL_PROMPTS = 4
BODIES_AT_ONCE = 16  # of the largest size, that may be on their way
SMALL_BODY_BYTES = 64 * 1024  # of routes that ask the model nothing


def largest_body_bytes(context_tokens: int) -> int:
    return FIXED_BYTES + FULL_PROMPTS * BYTES_PER_TOKEN * context_tokens
