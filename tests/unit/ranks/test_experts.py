"""Experts over real ranks have the bits of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import moe
from reference.expert_problems import Problem, build_layer, per_expert_tensors, present, random_problem
from reference.ranks.real_ranks import run_ranks
from safetensors.torch import save_file
from torch import Tensor

from kt_runtime.errors import NumericsError
from kt_runtime.experts import ExpertGradients, ExpertShape, ExpertStore, LoraSlot
from kt_runtime.ranks import Exchange, Share, SharedExperts, TrainedExperts, experts

EXPERTS, HIDDEN, INNER, TOP_K = 6, 48, 40, 3
KEY = "mlp.experts"


def own_slots(problem: Problem, experts: range) -> list[LoraSlot | None]:
    def part(slot: LoraSlot) -> LoraSlot:
        return slot.with_tensors([present(each)[experts.start : experts.stop] for each in slot.tensors()])

    return [None if slot is None else part(slot) for slot in problem.slots]


def over_ranks(problem: Problem, num_ranks: int, directory: str, expert_format: str | None = None) -> list[Tensor]:
    """Every rank's result, which has read its experts only."""
    save_file(per_expert_tensors(problem.experts, KEY), f"{directory}/model.safetensors")

    def work(exchange: Exchange) -> Tensor:
        return layer_of(directory, exchange, expert_format).forward(
            problem.x,
            problem.ids,
            problem.weights,
            slots=own_slots(problem, exchange.share.of(EXPERTS, "experts")),
            token_slots=problem.token_slots,
        )

    return run_ranks(num_ranks, work)


def layer_of(directory: str, exchange: Exchange, expert_format: str | None = None) -> SharedExperts:
    share = exchange.share.of(EXPERTS, "experts")
    shape = ExpertShape(EXPERTS, HIDDEN, INNER)
    store = ExpertStore.load(Path(directory), {0: KEY}, shape, num_threads=1, expert_format=expert_format, share=share)
    assert store.shape.num_experts == len(share)
    return SharedExperts(store.layers[0], exchange, EXPERTS)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("dtype", "expert_format"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8")]
)
def test_the_sum_over_ranks_has_the_bits_of_one_process(
    tmp_path: Path, num_ranks: int, dtype: torch.dtype, expert_format: str | None
) -> None:
    problem = random_problem(EXPERTS, HIDDEN, INNER, 23, TOP_K, dtype=dtype, ranks=(4, 0, 2), seed=7)
    expected = build_layer(problem.experts, num_threads=1, expert_format=expert_format).forward(
        problem.x, problem.ids, problem.weights, **problem.lora
    )
    parts = over_ranks(problem, num_ranks, str(tmp_path), expert_format)
    assert torch.equal(sum(parts[1:], parts[0]), expected)
    columns = [Share(rank, num_ranks).of(HIDDEN, "columns") for rank in range(num_ranks)]
    for rank, part in enumerate(parts):
        others = [column for column in range(HIDDEN) if column not in columns[rank]]
        assert bool((part[:, others] == 0).all()) and bool(torch.signbit(part[:, others]).all())


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("dtype", "expert_format"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8")]
)
@pytest.mark.parametrize(("dropout", "least"), [(0.0, 1), (0.3, 1), (0.0, experts.LEAST_PAIRS)])
def test_gradients_over_ranks_have_the_bits_of_one_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: int,
    dtype: torch.dtype,
    expert_format: str | None,
    dropout: float,
    least: int,
) -> None:
    """`least` 1: each expert's pairs are a part of their own."""
    monkeypatch.setattr(experts, "LEAST_PAIRS", least)
    problem = random_problem(EXPERTS, HIDDEN, INNER, 23, TOP_K, dtype=dtype, ranks=(4, 0, 2), seed=7)
    for number, slot in enumerate(problem.slots):
        if slot is not None:
            slot.dropout, slot.seed = dropout, 5 + number
    by_out = torch.randn(23, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)
    save_file(per_expert_tensors(problem.experts, KEY), f"{tmp_path}/model.safetensors")

    def passes(layer: Any, slots: list[LoraSlot | None]) -> tuple[Tensor, ExpertGradients]:
        given = {"slots": slots, "token_slots": problem.token_slots}
        out = layer.forward(problem.x, problem.ids, problem.weights, **given)
        return out, layer.backward(by_out, problem.x, problem.ids, problem.weights, **given)

    def work(exchange: Exchange) -> tuple[Tensor, ExpertGradients]:
        own = ExpertStore.load(
            tmp_path,
            {0: KEY},
            ExpertShape(EXPERTS, HIDDEN, INNER),
            num_threads=1,
            expert_format=expert_format,
            share=exchange.share.of(EXPERTS, "experts"),
        ).layers[0]
        layer = TrainedExperts(own, exchange, EXPERTS)
        return passes(layer, own_slots(problem, exchange.share.of(EXPERTS, "experts")))

    one = build_layer(problem.experts, num_threads=1, expert_format=expert_format)
    out, expected = passes(one, list(problem.slots))
    for rank, (found_out, found) in enumerate(run_ranks(num_ranks, work)):
        assert torch.equal(found_out, out)
        assert torch.equal(found.x, expected.x) and torch.equal(found.weights, expected.weights)
        held = Share(rank, num_ranks).of(EXPERTS, "experts")
        for own, whole in zip(found.slots, expected.slots, strict=True):
            assert (own is None) == (whole is None)
            for a, b in zip(own.tensors() if own else (), whole.tensors() if whole else (), strict=True):
                assert a is b or torch.equal(present(a), present(b)[held.start : held.stop])


def test_some_whole_experts_are_computed_at_a_time() -> None:
    ids = torch.randint(64, (512, 4), generator=torch.Generator().manual_seed(1))
    for rank, held in enumerate((range(32), range(32, 64))):
        pairs = experts._Pairs.of(ids, held, Share(rank, 2))
        parts = list(pairs.parts())
        assert [part.start for part in parts[1:]] + [len(pairs.own)] == [part.stop for part in parts]
        assert max(part.stop - part.start for part in parts) <= max(experts.LEAST_PAIRS, -(-len(pairs.own) // 8))
        seen = [set(pairs.experts[part, 0].tolist()) for part in parts]
        assert sum(map(len, seen)) == len(set().union(*seen)) == 32
        for expert in held:
            rows = (ids == expert).any(1).nonzero().squeeze(1).unique()
            of_expert = pairs.tokens[pairs.experts[:, 0] == expert - held.start]
            assert torch.equal(of_expert.unique_consecutive(), rows)


def test_partial_sums_of_ranks_would_have_other_bits() -> None:
    """What the exchange of rows is for: added up in another order, the same experts differ."""
    problem = random_problem(EXPERTS, HIDDEN, INNER, 23, TOP_K, seed=7)
    layer = build_layer(problem.experts, num_threads=1)
    whole = layer.forward(problem.x, problem.ids, problem.weights)
    halves = [torch.where((problem.ids // 3) == rank, problem.ids, -1) for rank in range(2)]
    parts = [layer.forward(problem.x, ids, problem.weights) for ids in halves]
    assert torch.allclose(parts[0] + parts[1], whole, rtol=0, atol=2e-6)  # 2.4e-7 measured
    assert not torch.equal(parts[0] + parts[1], whole)


@pytest.mark.slow
def test_tokens_without_experts_and_calls_without_tokens(tmp_path: Path) -> None:
    problem = random_problem(EXPERTS, HIDDEN, INNER, 4, TOP_K, seed=1)
    none = replace(problem, ids=torch.full_like(problem.ids, -1))
    for part in over_ranks(none, 2, str(tmp_path)):
        assert not part.any()
    empty = replace(problem, x=problem.x[:0], ids=problem.ids[:0], weights=problem.weights[:0])
    assert [part.shape for part in over_ranks(empty, 2, str(tmp_path))] == [(0, HIDDEN)] * 2


@pytest.mark.parametrize("name", ["x", "weights"])
def test_all_ranks_refuse_what_is_not_finite(tmp_path: Path, name: str) -> None:
    problem = random_problem(EXPERTS, HIDDEN, INNER, 4, TOP_K, seed=1)
    getattr(problem, name)[2, 1] = torch.nan
    save_file(per_expert_tensors(problem.experts, KEY), f"{tmp_path}/model.safetensors")

    def work(exchange: Exchange) -> str:
        with pytest.raises(NumericsError) as raised:
            layer_of(str(tmp_path), exchange).forward(problem.x, problem.ids, problem.weights)
        return str(raised.value)

    assert run_ranks(2, work) == [f"{name} has NaN or Inf"] * 2


@pytest.mark.slow
def test_a_rank_never_holds_more_than_its_share_and_half_a_layer(tmp_path: Path) -> None:
    experts, size, layers = 8, 512, 6
    shape = ExpertShape(experts, size, size)
    one = moe.random_experts(experts, size, size, seed=0)
    tensors = [per_expert_tensors(one, f"layers.{layer}") for layer in range(layers)]
    save_file({name: tensor for each in tensors for name, tensor in each.items()}, tmp_path / "model.safetensors")
    layer_bytes = 3 * experts * size * size * 2

    def load(exchange: Exchange) -> tuple[int, int]:
        """The store's bytes, and how much the process has grown at most."""
        share = exchange.share.of(experts, "experts")
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far (proc(5))
        before = kib("VmRSS")
        keys = {layer: f"layers.{layer}" for layer in range(layers)}
        store = ExpertStore.load(tmp_path, keys, shape, num_threads=1, share=share)
        return store.resident_bytes, 1024 * (kib("VmHWM") - before)

    for resident_bytes, grown_bytes in run_ranks(2, load):
        assert resident_bytes == layers * layer_bytes // 2
        assert grown_bytes < resident_bytes + layer_bytes // 2  # 0.09 of a layer measured


def kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))
