"""The size limit of a request's body, known before the first byte is read.

    largest body = 1 MiB + 64 bytes × context length

A prompt takes at most about 16 bytes per token, as text with escapes or as token ids with commas, so a body has room
for four prompts of full length or more shorter ones. The 1 MiB is for tools, schemas and stop strings, which also have
bounds of their own. The limit is 3.5 MiB for Qwen3-30B-A3B (40,960 tokens) and 11 MiB for DeepSeek-V3 (163,840).
"""

from __future__ import annotations

FIXED_BYTES = 1024 * 1024
BYTES_PER_TOKEN = 16
FULL_PROMPTS = 4
BODIES_AT_ONCE = 16  # bodies of the largest size that may be read concurrently
SMALL_BODY_BYTES = 64 * 1024  # of routes that do not use the model


def largest_body_bytes(context_tokens: int) -> int:
    return FIXED_BYTES + FULL_PROMPTS * BYTES_PER_TOKEN * context_tokens
