"""The store of routes: what is found again, what makes room, and how much memory it takes."""

from __future__ import annotations

import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.resident.routes.keys import TokenKeys
from kt_runtime.resident.routes.store import RouteStore

LAYERS, TOP_K = 3, 2


def store_of(tokens: int, num_experts: int = 8) -> RouteStore:
    return RouteStore(LAYERS, TOP_K, num_experts, tokens * RouteStore.bytes_of_token(LAYERS, TOP_K, num_experts))


def ids(*values: int) -> npt.NDArray[np.int32]:
    """Of each token its value, in every layer and place."""
    return np.broadcast_to(np.array(values, np.int32)[:, None, None], (len(values), LAYERS, TOP_K))


def found(store: RouteStore, keys: list[bytes]) -> list[int | None]:
    known, rows = store.find(keys)
    assert all(len(set(row.reshape(-1).tolist())) == 1 for row in rows[known])
    return [int(row[0, 0]) if is_known else None for row, is_known in zip(rows, known, strict=True)]


def keys_of(count: int, version: str = "v") -> list[bytes]:
    return TokenKeys(version).extend(range(count))


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, np.uint8), (256, np.uint8), (257, np.uint16)])
def test_routes_are_found_again_in_the_smallest_type_that_names_every_expert(num_experts: int, dtype: type) -> None:
    store, keys = store_of(10, num_experts), keys_of(3)
    highest = num_experts - 1
    store.put(keys, ids(0, 5, highest))
    assert found(store, keys) == [0, 5, highest] and store.find(keys)[1].dtype == dtype
    assert found(store, keys_of(3, "another version")) == [None] * 3
    assert found(store, [*keys_of(4)[3:], keys[1]]) == [None, 5]


def test_the_oldest_make_room() -> None:
    store, keys = store_of(4), keys_of(9)
    for index, key in enumerate(keys[:6]):
        store.put([key], ids(index % 8))
    assert found(store, keys) == [None, None, 2, 3, 4, 5, None, None, None]
    assert len(store) == 4 == store.capacity_tokens
    assert store.status().dropped_tokens == 2
    store.put(keys, ids(*(index % 8 for index in range(9))))  # more than there is room for
    assert found(store, keys)[5:] == [5, 6, 7, 0] and len(store) == 4


def test_a_token_that_is_put_again_keeps_its_row_while_it_is_young_and_a_place_of_its_own_when_it_is_old() -> None:
    store, keys = store_of(4), keys_of(6)
    store.put(keys[:2], ids(0, 1))
    store.put(keys[:2], ids(0, 1))
    assert len(store) == 2 and store.status().dropped_tokens == 0
    store.put(keys[2:4], ids(2, 3))  # full: 0 and 1 are the older half
    store.renew(keys[:1])
    store.put(keys[4:6], ids(4, 5))
    assert found(store, keys) == [0, None, None, 3, 4, 5]
    store.renew(keys_of(2, "unknown"))
    assert found(store, keys) == [0, None, None, 3, 4, 5]


def test_any_order_of_puts_and_renewals_finds_what_was_put_last_and_never_more_than_there_is_room_for() -> None:
    drawn = np.random.default_rng(3)
    store, keys = store_of(7), keys_of(12)
    for _ in range(500):
        chosen = drawn.choice(12, size=drawn.integers(1, 6), replace=False).tolist()
        some = [keys[index] for index in chosen]
        if drawn.random() < 0.3:
            store.renew(some)
        else:
            store.put(some, ids(*(index % 8 for index in chosen)))
            assert found(store, some) == [index % 8 for index in chosen]
        assert all(value in (None, index % 8) for index, value in enumerate(found(store, keys)))
        assert len(store) <= 7


@pytest.mark.slow
def test_all_memory_is_taken_at_the_start_and_is_the_size_that_was_given() -> None:
    tokens = 4_000
    some = [(keys_of(tokens, version), ids(*[1] * tokens)) for version in ("a", "b", "c")]
    tracemalloc.start()
    try:
        store = store_of(tokens)
        at_first, _ = tracemalloc.get_traced_memory()
        for keys, values in some:
            store.put(keys, values)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(store) == tokens and store.dropped_tokens == 2 * tokens
    few = 10_000  # also of threads that other tests left; an object for each token is 100 KB and more
    assert 0 <= at_first - store.size_bytes <= few, "beside the rows and the keys there are a few objects"
    assert taken - at_first <= few


def test_a_size_without_room_for_a_token_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="10 bytes for routes: a token takes 38"):
        RouteStore(LAYERS, TOP_K, 8, 10)
