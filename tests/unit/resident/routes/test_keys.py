"""A token's key is a function of the adapter's version and of the tokens up to it, and of nothing else."""

from __future__ import annotations

import numpy as np

from kt_runtime.resident.routes.keys import BASE, KEY_BYTES, TokenKeys


def test_keys_do_not_depend_on_how_the_sequence_is_cut() -> None:
    tokens = [5, 6, 70_000, 0, 5]
    whole = TokenKeys("v1").extend(tokens)
    parts = TokenKeys("v1")
    assert [*parts.extend(tokens[:2]), *parts.extend([]), *parts.extend(np.array(tokens[2:], np.int32))] == whole
    assert parts.length == 5 and {len(key) for key in whole} == {KEY_BYTES}


def test_a_token_before_or_another_version_gives_other_keys() -> None:
    keys = TokenKeys("v1").extend([5, 6, 7])
    assert TokenKeys("v1").extend([5, 6, 8])[:2] == keys[:2]
    others = [
        *TokenKeys("v1").extend([5, 6, 8])[2:],
        *TokenKeys("v1").extend([4, 6, 7]),
        *TokenKeys("v2").extend([5, 6, 7]),
        *TokenKeys(BASE).extend([5, 6, 7]),
    ]
    assert len({*keys, *others}) == 3 + 10
