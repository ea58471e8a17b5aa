"""Rows that are not finite on one rank only."""

from __future__ import annotations

from reference.ranks.real_ranks import run_ranks

from kt_runtime.sglang_patch.faults.finite_rows import noted_by_any


def test_what_one_rank_notes_ends_the_request_on_all() -> None:
    """Each rank sees the keys of its own heads: one of three requests is bad on rank 0, another one on rank 1."""
    found = run_ranks(2, lambda exchange: noted_by_any(exchange, [2 * exchange.share.rank], 3))
    assert found == [[0, 2], [0, 2]]
