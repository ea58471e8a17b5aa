"""Names of pages: a look-up must name a page as the tree, which computes its own names, does."""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

import pytest

from kt_runtime.sglang_patch.cache.page_hash import get_native_hash

PAGE = 64


def chain(tokens: list[int], digest: bytes, page_tokens: int) -> list[str]:
    names = []
    for start in range(0, len(tokens), page_tokens):
        page = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + page_tokens])
        digest = hashlib.sha256(digest + page).digest()
        names.append(digest.hex())
    return names


@pytest.mark.parametrize("num_tokens", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("prior", [None, b"d" * 32])
def test_each_page_is_named_after_all_before_it(num_tokens: int, prior: bytes | None) -> None:
    tokens = list(range(70_000, 70_000 + num_tokens))
    assert get_native_hash(tokens, prior, PAGE) == chain(tokens, prior or b"", PAGE)
    whole = hashlib.sha256((prior or b"") + array("I", tokens).tobytes()).hexdigest()
    assert get_native_hash(tokens, prior) == whole


@pytest.mark.parametrize("extra_key", [None, "kt1|abc|-"])
def test_a_look_up_names_pages_as_the_tree_does(patched_sglang: None, extra_key: str | None) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    key = RadixKey(array("q", range(1000, 1000 + 3 * PAGE)), extra_key=extra_key)
    core = tree_with(key)
    node = core.match_prefix(MatchPrefixParams(key=key)).last_device_node
    core.backfill_missing_hash_values()
    names = core.get_hash_values(node)
    assert len(names) == 3
    assert get_storage_hash_str(key, None, page_size=PAGE) == names
    assert get_storage_hash_str(key[PAGE:], names[0], page_size=PAGE) == names[1:]


def tree_with(key: Any) -> Any:
    """The core of SGLang's tree that the server uses, with one text in it."""
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    core = RustUnifiedTreeCore(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=None,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
        )
    )
    core.set_hicache_enabled()
    core.enable_storage = True
    step = core.begin_insert(InsertParams(key=key, value=torch.arange(len(key))))
    while step.result is None:
        step = core.resume_insert()
    core.end_insert()
    return core
