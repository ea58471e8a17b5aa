"""Copies between SGLang's own pools, on a CPU."""

from __future__ import annotations

from typing import Any

import torch

# Pages out of order, so that a copy that ignores one of the indices shows.
SLOTS = torch.cat([torch.arange(128, 192), torch.arange(64, 128), torch.arange(320, 384)])


def test_pages_come_back_from_the_host_as_they_went(pools: Any) -> None:
    expected = [layer[SLOTS].clone() for layer in pools.layers]
    untouched = [layer[768:].clone() for layer in pools.layers]
    pools.host.alloc(64)  # so that the host's slots are not those from zero on
    host_slots = pools.copy_to_host(SLOTS)
    for layer in pools.layers:
        layer[:768] = 0
    new = torch.arange(512, 704)
    pools.copy_to_device(host_slots, new)
    for layer, pages, rest in zip(pools.layers, expected, untouched, strict=True):
        assert torch.equal(layer[new], pages)
        assert torch.equal(layer[768:], rest)
        assert not layer[:512].any()


def test_a_page_is_written_where_its_index_says(pools: Any) -> None:
    first = pools.copy_to_host(SLOTS[:64])
    before = pools.host.get_data_page(first[0]).clone()
    pools.copy_to_host(SLOTS[64:])
    assert torch.equal(pools.host.get_data_page(first[0]), before)
