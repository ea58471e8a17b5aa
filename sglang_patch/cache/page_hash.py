"""Hashes of pages without a compiler.

Symbol: `sglang.srt.mem_cache.utils.get_native_hash` (SGLang 0.5.23). Reason: it compiles an extension at the first
look-up in the storage tier, which takes half a minute and needs g++, ninja and OpenSSL's headers; without them every
look-up fails. The hashes are the same: the tree of nodes, which computes its own, must find what this one names.
On a GPU as well: hashing 32,768 tokens takes two milliseconds, so that nothing is lost.
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
    """SHA-256 of (digest before, token ids as 4 bytes each, little endian), hexadecimal: of all tokens, or, with
    `page_size`, of each page, its digest going into the next one's. The last page may be a part of one."""
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
