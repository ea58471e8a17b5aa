"""DeepSeek's choice of experts against Hugging Face's routers, and bits that do not depend on the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference.drawn import drawn
from reference.instruction_sets import instruction_sets
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from kt_runtime.errors import InvalidValueError
from kt_runtime.experts import dense
from kt_runtime.experts.dense import GroupedRouting
from kt_runtime.ops.grouped_router import grouped_top_k
from kt_runtime.resident.twin.routed import GroupedRouter, grouped_router

HIDDEN, EXPERTS, CHOSEN = 48, 32, 5
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "n_routed_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
SIZES |= {"routed_scaling_factor": 2.5, "num_attention_heads": 4}


def sigmoid_router() -> torch.nn.Module:
    router = DeepseekV3TopkRouter(DeepseekV3Config(**SIZES, n_group=8, topk_group=3, norm_topk_prob=True))
    router.get_buffer("e_score_correction_bias").copy_(drawn(EXPERTS, seed=1) / 10)
    return router


def grouped_softmax_router() -> torch.nn.Module:
    config = DeepseekV2Config(**SIZES, n_group=4, topk_group=2, topk_method="group_limited_greedy")
    return DeepseekV2TopkRouter(config)


def greedy_router() -> torch.nn.Module:
    return DeepseekV2TopkRouter(DeepseekV2Config(**SIZES, n_group=1, topk_group=1, topk_method="greedy"))


ROUTERS: list[Callable[[], torch.nn.Module]] = [sigmoid_router, grouped_softmax_router, greedy_router]


def by_expert(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[T, E]: the weight of each expert, 0 for those that were not chosen."""
    return torch.zeros(len(weights), EXPERTS, dtype=weights.dtype).scatter(1, ids.long(), weights)


@pytest.mark.parametrize("make", ROUTERS)
def test_experts_weights_and_gradients_are_hugging_faces(make: Callable[[], torch.nn.Module]) -> None:
    """Measured: weights 4.8e-7 of up to 1.8; gradients 4.2e-7 of up to 1."""
    router = make()
    with torch.no_grad():
        router.get_parameter("weight").copy_(drawn(EXPERTS, HIDDEN, seed=0) / 5)
    hidden, by_weight = drawn(40, HIDDEN, seed=2).requires_grad_(), drawn(40, EXPERTS, seed=3)
    _, weights, ids = router(hidden)
    expected = by_expert(weights, ids)
    wanted = torch.autograd.grad(expected, hidden, by_weight)[0]
    router.weight.requires_grad_(False)
    assert grouped_router(router) is GroupedRouter
    router.__class__ = GroupedRouter
    logits, weights, ids = router(hidden)
    assert logits.shape == (40, EXPERTS) and weights.dtype == torch.float32
    found = by_expert(weights, ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(found, hidden, by_weight)[0], wanted, rtol=0, atol=4e-6)


ROUTINGS = [
    GroupedRouting(groups=8, top_groups=3, top_k=5, is_sigmoid=True, normalises=True, scaling=2.5),
    GroupedRouting(groups=4, top_groups=2, top_k=6, is_sigmoid=False, normalises=False, scaling=16.0),
    GroupedRouting(groups=1, top_groups=1, top_k=32, is_sigmoid=False, normalises=True, scaling=1.0),
]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_token_s_choice_depends_neither_on_the_batch_nor_on_threads_nor_on_the_instruction_set(
    routing: GroupedRouting,
) -> None:
    logits, bias = 3 * drawn(1100, EXPERTS, seed=4), drawn(EXPERTS, seed=5) if routing.is_sigmoid else None
    weights, ids = grouped_top_k(logits, bias, routing)
    try:
        for isa in instruction_sets():
            for threads in (1, 3):
                dense.configure(isa, threads)
                again = grouped_top_k(logits, bias, routing)
                assert torch.equal(again[0], weights) and torch.equal(again[1], ids)
    finally:
        dense.configure()
    for token in (0, 533, 1099):
        alone = grouped_top_k(logits[token : token + 1], bias, routing)
        assert torch.equal(alone[0][0], weights[token]) and torch.equal(alone[1][0], ids[token])


def test_of_equal_experts_and_groups_the_first_are_chosen() -> None:
    routing = GroupedRouting(groups=4, top_groups=2, top_k=3, is_sigmoid=True, normalises=True, scaling=1.0)
    logits = torch.zeros(2, 16)
    logits[1, 13] = 1.0
    weights, ids = grouped_top_k(logits, torch.zeros(16), routing)
    assert ids.tolist() == [[0, 1, 2], [13, 0, 1]]
    torch.testing.assert_close(weights.sum(-1), torch.ones(2), rtol=0, atol=2.0**-23)  # 0 measured; one rounding


@pytest.mark.parametrize("routing", ROUTINGS)
def test_experts_that_are_given_as_the_router_chooses_them_have_its_bits(routing: GroupedRouting) -> None:
    logits, bias = 3 * drawn(70, EXPERTS, seed=4), drawn(EXPERTS, seed=5) if routing.is_sigmoid else None
    weights, ids = grouped_top_k(logits, bias, routing)
    try:
        for isa in instruction_sets():
            dense.configure(isa, 2)
            again, same = grouped_top_k(logits, bias, routing, ids)
            assert torch.equal(again, weights) and torch.equal(same, ids)
    finally:
        dense.configure()


@pytest.mark.parametrize("routing", ROUTINGS)
def test_weights_of_given_experts_and_their_gradient_are_the_formulas_in_float64(routing: GroupedRouting) -> None:
    """Of any groups, in any order. The bias only chooses: it has no part."""
    logits, by_weights = drawn(40, EXPERTS, seed=8).requires_grad_(), drawn(40, routing.top_k, seed=9)
    order = [torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(row)) for row in range(40)]
    given = torch.stack([row[: routing.top_k] for row in order]).int()
    weights, ids = grouped_top_k(logits, drawn(EXPERTS, seed=5), routing, given)
    assert torch.equal(ids, given)
    exact = logits.detach().double().requires_grad_()
    scores = exact.sigmoid() if routing.is_sigmoid else exact.softmax(-1)
    chosen = scores.gather(1, given.long())
    wanted = routing.scaling * (chosen / (chosen.sum(-1, keepdim=True) + 1e-20) if routing.normalises else chosen)
    torch.testing.assert_close(weights.double(), wanted, rtol=3e-6, atol=0)  # 3.9e-7 measured
    found = torch.autograd.grad(weights, logits, by_weights)[0]
    expected = torch.autograd.grad(wanted, exact, by_weights.double())[0]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)  # 2.3e-7 measured


@pytest.mark.parametrize("is_sigmoid", [True, False])
def test_a_token_s_gradient_does_not_depend_on_the_other_tokens(is_sigmoid: bool) -> None:
    """With 12 experts, which are not a whole number of PyTorch's vectors."""
    routing = GroupedRouting(groups=4, top_groups=2, top_k=3, is_sigmoid=is_sigmoid, normalises=is_sigmoid, scaling=2.5)
    logits, by_weights = 3 * drawn(40, 12, seed=10), drawn(40, 3, seed=11)

    def gradient(tokens: slice) -> torch.Tensor:
        leaf = logits[tokens].clone().requires_grad_()
        return torch.autograd.grad(grouped_top_k(leaf, None, routing)[0], leaf, by_weights[tokens])[0]

    whole = gradient(slice(40))
    assert all(torch.equal(gradient(slice(token, token + 1))[0], whole[token]) for token in range(40))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_nan_gives_valid_experts_and_stays_in_its_token(routing: GroupedRouting) -> None:
    logits, bias = drawn(6, EXPERTS, seed=6), drawn(EXPERTS, seed=7) if routing.is_sigmoid else None
    clean = grouped_top_k(logits, bias, routing)
    logits[2] = float("nan")
    weights, ids = grouped_top_k(logits, bias, routing)
    assert weights[2].isnan().all() and ids[2].min() >= 0 and ids[2].max() < EXPERTS
    assert len(ids[2].unique()) == routing.top_k
    others = [0, 1, 3, 4, 5]
    assert torch.equal(weights[others], clean[0][others]) and torch.equal(ids[others], clean[1][others])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"groups": 5}, "groups is 5, which does not divide the 32 experts"),
        ({"top_groups": 9}, "top_groups is 9; allowed: 1 to 8"),
        ({"top_k": 13}, "top_k is 13; 3 groups have 12 experts"),
    ],
)
def test_what_can_not_be_chosen_is_named(changed: dict[str, int], message: str) -> None:
    kept: dict[str, Any] = {"groups": 8, "top_groups": 3, "top_k": 5, **changed}
    routing = GroupedRouting(**kept, is_sigmoid=True, normalises=True, scaling=1.0)
    with pytest.raises(InvalidValueError, match=message):
        grouped_top_k(torch.zeros(3, EXPERTS), None, routing)
