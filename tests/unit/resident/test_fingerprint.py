"""The hash of all weights: once, beside the engine, and of what the twin computes with."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference.cases import choose
from reference.ranks.real_ranks import run_ranks
from reference.resident.configs import CONFIGS, FURTHER
from reference.resident.split_host import split_host

from kt_runtime.ranks import Exchange, HashingGroup
from kt_runtime.resident.fingerprint import NICENESS, WeightsFingerprint, hash_weights, hash_weights_of_ranks
from kt_runtime.resident.twin.model import dense_views

FEW = ["deepseek_v3"]
FAMILIES = sorted({*CONFIGS, *FURTHER})


def test_it_is_of_what_the_twin_computes_with_before_there_is_a_twin(lab: Any) -> None:
    views = dense_views(lab.host.config, lab.host.tensors())
    assert hash_weights(views, lab.host.experts) == lab.fingerprint()
    assert lab.host.weights.future().result(60) == lab.fingerprint()


def test_the_number_of_threads_does_not_matter(deepseek_lab: Any) -> None:
    with ThreadPoolExecutor(3) as threads:
        found = hash_weights(deepseek_lab.twin.views(), deepseek_lab.host.experts, threads.map)
    assert found == deepseek_lab.fingerprint()


def test_names_types_and_shapes_are_part_of_it(deepseek_lab: Any) -> None:
    views, experts = dict(deepseek_lab.twin.views()), deepseek_lab.host.experts
    name = "model.layers.0.mlp.gate_proj.weight"
    others = [
        {**views, name: views[name].reshape(-1)},
        {**views, name: views[name].view(torch.int32)},
        {("other" if key == name else key): value for key, value in views.items()},
        {**views, name: views["model.layers.0.mlp.up_proj.weight"]},
    ]
    assert len({hash_weights(each, experts) for each in (views, *others)}) == 5


@pytest.mark.slow
@pytest.mark.parametrize("family", choose(few=FEW, usual=FAMILIES, every=FAMILIES))
def test_ranks_have_the_fingerprint_of_one_process(
    make_host: Callable[..., Any], make_further_host: Callable[..., Any], lab_of: Callable[[Any], Any], family: str
) -> None:
    """Fused layers in parts, a padded vocabulary, pieces of Gated DeltaNet, latent attention; and a byte that differs
    on the last rank only."""

    def whole() -> Any:
        return (make_host if family in CONFIGS else make_further_host)(family)

    def of_rank(exchange: Exchange) -> list[str]:
        assert dist.group.WORLD is not None
        lab = lab_of(split_host(whole(), exchange))
        group = HashingGroup(dist.group.WORLD)
        parts = lab.twin.parts()
        found = [hash_weights_of_ranks(parts, lab.host.experts, group) for _ in range(2)]
        if exchange.share.rank == 1:
            part = next(part for name, part in reversed(parts.items()) if part.sizes)
            part.own.detach().view(torch.uint8).view(-1)[0] ^= 1
        return [*found, hash_weights_of_ranks(parts, lab.host.experts, group)]

    expected = lab_of(whole()).fingerprint()
    first, other = run_ranks(2, of_rank)
    assert first[:2] == [expected] * 2 and first[2] != expected
    assert other == [""] * 3


def test_it_is_computed_once_beside_the_caller_and_anew_on_request() -> None:
    go, answers = threading.Event(), ["first", "second"]

    def compute(each: Any) -> str:
        go.wait(60)
        return answers.pop(0)

    weights = WeightsFingerprint(compute)
    asked = [weights.future() for _ in range(3)]
    assert not asked[0].done()
    go.set()
    assert [each.result(10) for each in asked] == ["first"] * 3
    assert weights.future(fresh=True).result(10) == "second"
    assert weights.future().result(10) == "second"
    weights.close()


def test_all_that_hashes_has_low_priority() -> None:
    """Also what computes it: of ranks, the one that hashes the dense weights."""

    def compute(each: Callable[..., Any]) -> str:
        return str([priority(), *each(priority, range(3))])

    weights = WeightsFingerprint(compute)
    try:
        assert weights.future().result(60) == str(4 * [NICENESS])
    finally:
        weights.close()


def priority(_number: int = 0) -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_who_asks_gets_the_error() -> None:
    def compute(each: Any) -> str:
        raise RuntimeError("out of memory")

    weights = WeightsFingerprint(compute)
    with pytest.raises(RuntimeError, match="out of memory"):
        weights.future().result(10)
    weights.close()


def test_closing_does_not_wait_for_a_large_model() -> None:
    began, go = threading.Event(), threading.Event()

    def hash_one(_: int) -> str:
        began.set()
        go.wait(60)
        return ""

    weights = WeightsFingerprint(lambda each: "".join(each(hash_one, range(1000))), num_threads=1)
    asked = weights.future()
    assert began.wait(60)
    weights.close()
    go.set()
    with pytest.raises(CancelledError):
        asked.result(10)
