"""What else pages depend on besides their tokens: two servers share pages exactly when their namespaces are equal."""

from __future__ import annotations

import dataclasses
import hashlib

from kt_runtime.cache.record import FORMAT_VERSION, NAMESPACE_BYTES
from kt_runtime.errors import InvalidValueError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Namespace:
    """`weights`: fingerprint of the model's weights. `configuration`: hash of whatever else changes KV (rope scaling,
    context length, attention backend). `layout`: order of the bytes in a page ("page_first_direct").
    `shard`: which part of a page this process holds ("0/1": rank 0 of 1).
    `adapter`: content hash of the adapter version, or "" where the page keys contain it already.
    """

    weights: str
    kv_dtype: str
    page_tokens: int
    layout: str
    configuration: str = ""
    adapter: str = ""
    shard: str = "0/1"

    def __post_init__(self) -> None:
        for name in ("weights", "kv_dtype", "layout"):
            if not getattr(self, name):
                raise InvalidValueError(f"cache namespace: {name} is empty; pages of different models would mix")
        if self.page_tokens < 1:
            raise InvalidValueError(f"cache namespace: page_tokens is {self.page_tokens}; allowed: 1 and more")

    def digest(self) -> bytes:
        """16 bytes. Each field is hashed with its name and length, so that no two sets of fields run together."""
        digest = hashlib.blake2b(f"kt-runtime page {FORMAT_VERSION}".encode(), digest_size=NAMESPACE_BYTES)
        for field in dataclasses.fields(self):
            value = str(getattr(self, field.name)).encode()
            digest.update(f"{field.name}:{len(value)}:".encode() + value)
        return digest.digest()
