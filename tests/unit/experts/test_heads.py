"""Linear layers of single heads: the bits of `dense.linear`, whatever the call."""

from __future__ import annotations

import pytest
import torch
from reference.drawn import drawn
from reference.instruction_sets import instruction_sets

from kt_runtime.errors import InvalidValueError
from kt_runtime.experts import dense

DTYPES = (torch.float32, torch.bfloat16)
pytestmark = pytest.mark.usefixtures("the_best_of_this_machine_afterwards")


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 16, 70, 300])
def test_a_head_has_the_bits_of_a_linear_layer(isa: str, dtype: torch.dtype, tokens: int) -> None:
    dense.configure(isa, 3)
    x = drawn(tokens, 5, 60, seed=0, dtype=dtype)[:, :, 4:52]  # a part of each head's columns
    weight = drawn(5, 70, 48, seed=1, dtype=dtype)
    found = dense.linear_heads(x, weight)
    assert found.dtype == dtype and found.shape == (tokens, 5, 70)
    for head in range(5):
        assert torch.equal(found[:, head], dense.linear(x[:, head], weight[head]))
    wide = dense.linear_heads(x, weight, out_dtype=torch.float32)
    assert torch.equal(wide.to(dtype), found)
    dense.configure(isa, 1)
    assert torch.equal(dense.linear_heads(x, weight), found)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_a_head_s_gradient_has_the_bits_of_a_linear_layer_s(isa: str, dtype: torch.dtype, tokens: int) -> None:
    dense.configure(isa, 3)
    by_out = drawn(tokens, 5, 60, seed=0, dtype=dtype)[:, :, 4:52]  # a part of each head's columns
    weight = drawn(5, 90, 70, seed=1, dtype=dtype)[:, 40:88]  # a part of each head's rows, as a half of kv_b_proj
    found = dense.linear_heads_backward(by_out, weight)
    assert found.dtype == dtype and found.shape == (tokens, 5, 70)
    for head in range(5):
        assert torch.equal(found[:, head], dense.linear_backward(by_out[:, head], weight[head]))
    dense.configure(isa, 1)
    assert torch.equal(dense.linear_heads_backward(by_out, weight), found)
    assert dense.linear_heads_backward(by_out[:0], weight).shape == (0, 5, 70)


def test_results_are_written_where_asked() -> None:
    x, weight = drawn(4, 3, 16, seed=2), drawn(3, 8, 16, seed=3)
    whole = torch.full((4, 3, 10), float("nan"))
    assert dense.linear_heads(x, weight, whole[:, :, :8]).data_ptr() == whole.data_ptr()
    assert torch.equal(whole[:, :, :8], dense.linear_heads(x, weight)) and whole[:, :, 8:].isnan().all()
    heads_first = drawn(3, 4, 16, seed=2)
    expected = dense.linear_heads(heads_first.transpose(0, 1).contiguous(), weight)
    assert torch.equal(dense.linear_heads(heads_first.transpose(0, 1), weight), expected)
    assert dense.linear_heads(x[:0], weight).shape == (0, 3, 8)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(InvalidValueError, match=r"weight has shape \[2, 8, 16\]; expected \[3, any, 16\]"):
        dense.linear_heads(torch.zeros(4, 3, 16), torch.zeros(2, 8, 16))
    with pytest.raises(InvalidValueError, match=r"weight has shape \[3, 8, 16\]; expected \[3, 16, any\]"):
        dense.linear_heads_backward(torch.zeros(4, 3, 16), torch.zeros(3, 8, 16))
