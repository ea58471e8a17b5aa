"""Which part of the model a rank has."""

from __future__ import annotations

import pytest
import torch

from kt_runtime.errors import InvalidValueError
from kt_runtime.ranks import Pieces, Share


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_shares_are_equal_and_cover_everything_once(num_ranks: int) -> None:
    parts = [Share(rank, num_ranks).of(12, "experts") for rank in range(num_ranks)]
    assert [number for part in parts for number in part] == list(range(12))
    assert {len(part) for part in parts} == {12 // num_ranks}


@pytest.mark.parametrize("total", [7, 0, 1])
def test_what_is_not_divided_is_refused_with_both_values(total: int) -> None:
    with pytest.raises(InvalidValueError, match=f"{total} experts can't be split evenly over 2 ranks"):
        Share(0, 2).of(total, "experts")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_of_placed_columns_has_every_bit_of_them(dtype: torch.dtype) -> None:
    whole = torch.randn(5, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole[0, :4] = torch.tensor([0.0, -0.0, torch.inf, 1e-45])
    shares = [Share(rank, 3) for rank in range(3)]
    parts = [share.placed(whole[:, share.of(12, "columns")], 12) for share in shares]
    for order in ((0, 1, 2), (2, 0, 1)):
        found = sum((parts[place] for place in order[1:]), parts[order[0]])
        assert torch.equal(found.view(torch.uint8), whole.view(torch.uint8))


@pytest.mark.parametrize("sizes", [(12,), (4, 2, 6)])
@pytest.mark.parametrize("dim", [0, 1])
def test_each_piece_is_split_by_itself(sizes: tuple[int, ...], dim: int) -> None:
    whole = torch.arange(12 * 12).view(12, 12)
    each = [Pieces(Share(rank, 2), sizes) for rank in range(2)]
    parts = [pieces.own(whole, dim) for pieces in each]
    by_piece = [piece.chunk(2, dim) for piece in whole.split(sizes, dim)]
    for rank, part in enumerate(parts):
        assert torch.equal(part, torch.cat([halves[rank] for halves in by_piece], dim))
        assert torch.equal(each[rank].ordered(torch.cat(parts, dim), dim), whole)


@pytest.mark.parametrize("sizes", [(12,), (4, 2, 6)])
def test_the_sum_of_placed_pieces_is_the_whole(sizes: tuple[int, ...]) -> None:
    whole = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    each = [Pieces(Share(rank, 2), sizes) for rank in range(2)]
    placed = [pieces.placed(pieces.own(whole).contiguous()) for pieces in each]
    assert torch.equal(placed[0] + placed[1], whole)
