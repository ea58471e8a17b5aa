"""Sessions over real ranks, each with its part of model and adapter, have the bits of one process: losses, gradients,
norms, many steps, published tensors, checkpoints."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference.cases import choose
from reference.ranks.real_ranks import KINDS, run_ranks
from reference.resident.configs import CONFIGS
from reference.resident.split_host import split_host, store_of

from kt_runtime.ranks import Exchange
from kt_runtime.resident.scheduler import run_at_once
from kt_runtime.resident.training import checkpoint
from kt_runtime.resident.training.slices import _Kept
from kt_runtime.resident.twin import split
from kt_runtime.wire import Samples
from kt_runtime.wire.messages import CrossEntropy, PolicyLoss, PreferenceLoss

MANY_STEPS = choose(few=2, usual=4, every=10)
STEPS = choose(few=2, usual=2, every=10)
"""Two: one whose norm is clipped, and the first batch again with a trained adapter. One way to train takes more."""
Results = dict[str, Any]
Work = Callable[[Any], Results]


@pytest.fixture
def make_session_lab(
    make_host: Callable[..., Any], make_further_host: Callable[..., Any], lab_of: Callable[[Any], Any]
) -> Callable[..., Any]:
    """`make(exchange, dtype, expert_format, family)`: a twin of one process (None), or of a rank."""

    def make(
        exchange: Exchange | None, dtype: torch.dtype, expert_format: str | None, family: str = "qwen3_moe"
    ) -> Any:
        host = (make_host if family in CONFIGS else make_further_host)(family, dtype=dtype)
        if exchange is not None:
            split_host(host, exchange, expert_format)
        elif expert_format is not None:
            host.experts = store_of(host, None, expert_format)
        lab = lab_of(host)
        if lab.twin.split is not None:
            run_at_once(lab.twin.split.fetch())
        return lab

    return make


def on_one_and_on(
    num_ranks: int,
    make: Callable[..., Any],
    work: Work,
    dtype: torch.dtype = torch.float32,
    expert_format: str | None = None,
    family: str = "qwen3_moe",
    kind: str = "sockets",
) -> tuple[Results, list[Results]]:
    """The results of one process, and of each of the ranks. `kind`: of the ranks' exchange."""
    expected = work(make(None, dtype, expert_format, family))  # first: it makes the checkpoint
    return expected, run_ranks(num_ranks, lambda exchange: work(make(exchange, dtype, expert_format, family)), kind)


def whole_gradients(session: Any) -> Results:
    return {name: session.parts.whole(name, value).clone() for name, value in sorted(session.gradient.items())}


def state_of(session: Any) -> Results:
    """All masters and moments, whole."""
    copied = run_at_once(checkpoint.snapshot(session, optimizer=True))
    adapter = copied.adapter.modules.items()
    return {f"{name} {kind}": each for name, pair in adapter for kind, each in zip("ab", pair, strict=True)} | (
        copied.optimizer
    )


def assert_same(expected: Any, found: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert expected.keys() == found.keys(), where
        for name, value in expected.items():
            assert_same(value, found[name], f"{where} {name}")
    elif isinstance(expected, torch.Tensor):
        assert expected.dtype == found.dtype and expected.shape == found.shape, where
        assert torch.equal(expected, found), f"{where}: {float((expected - found).abs().max())}"
    else:
        assert expected == found, where


def fill(session: Any) -> None:
    """B is not zero: of each rank its part of the same numbers."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, own in sorted(session.parameters.items()):
            if name.endswith("lora_B"):
                whole = torch.empty(session.parts.whole_shape(name, own)).normal_(0, 0.05, generator=generator)
                own.copy_(session.parts.own(name, whole))


Way = tuple[torch.dtype, str | None, dict[str, Any]]
AS_FAMILIES: dict[str, Way] = {  # which train in these ways, too
    "float32": (torch.float32, None, {}),
    "bf16": (torch.bfloat16, None, {}),
    "dropout": (torch.bfloat16, None, {"dropout": 0.2}),
}
WAYS: dict[str, Way] = {
    **AS_FAMILIES,
    "int8": (torch.bfloat16, "int8", {}),
    "attention": (torch.bfloat16, None, {"targets": ["attention"], "rank": 3}),
    "experts": (torch.float32, None, {"targets": ["experts"]}),
    "rank above the outputs of a rank": (torch.float32, None, {"rank": 16}),
}


@pytest.mark.parametrize("way", choose(few=["int8"], usual=list(WAYS), every=list(WAYS)))
def test_steps_have_the_bits_of_one_process(make_session_lab: Any, make_batch: Any, way: str) -> None:
    dtype, expert_format, settings = WAYS[way]
    work = steps_of(make_batch, settings, MANY_STEPS if way == "bf16" else STEPS)
    expected, ranks = on_one_and_on(2, make_session_lab, work, dtype, expert_format)
    assert_trained(expected, ranks)


@pytest.mark.slow
def test_steps_of_ranks_that_share_memory(make_session_lab: Any, make_batch: Any) -> None:
    """They fetch the columns for backward for each layer. Bf16, dense layers, shared experts and routed ones."""
    work = steps_of(make_batch, {}, STEPS)
    expected, ranks = on_one_and_on(2, make_session_lab, work, torch.bfloat16, family="glm4_moe", kind="memory")
    assert_trained(expected, ranks)


def test_what_a_rank_holds_for_backward(make_session_lab: Any, make_batch: Any) -> None:
    """Its columns of each layer's input, and columns of weights: of one layer at a time if ranks share memory."""
    batches = [make_batch(20, 11), make_batch(25, 9)]

    def work(lab: Any) -> Results:
        session, parts, held, inputs = lab.session(fill=False), lab.twin.split, [], []
        fill(session)
        release = parts.release

        def look() -> None:
            held.append(parts.fetched_bytes)
            kept = (each for each in gc.get_objects() if isinstance(each, _Kept) and each.split is not None)
            inputs.append([each.leaf.untyped_storage().nbytes() for each in kept])
            release()

        parts.release = look
        for batch in batches:
            lab.forward_backward(session, batch, 1000)
        held.append(parts.fetched_bytes)
        whole = sum(weight.rows.nbytes for weight in parts._each)  # a rank's columns are as large as its rows
        assert inputs[0] == lab.twin.num_layers * [4 * 2 * 20 * lab.host.config["hidden_size"] // 2]
        return {"held": held, "whole": whole, "head": parts.head.weight.rows.nbytes}

    sockets, memory = (
        run_ranks(2, lambda exchange: work(make_session_lab(exchange, torch.float32, None)), kind) for kind in KINDS
    )
    for found in sockets:
        assert set(found["held"]) == {found["whole"]}
    for found in memory:
        *held, after = found["held"]
        assert after == 0 and len(held) % 2 == 0
        head, *layers = held[: len(held) // 2]
        assert head == found["head"] and len(layers) > 1
        assert max(layers) <= (found["whole"] - head) / (len(layers) - 1)
        assert held == [head, *layers] * 2


FAMILIES = (
    *("mixtral", "olmoe", "minimax_m2", "gpt_oss", "llama4", "llama4 without norms"),
    *("glm4_moe without norms", "glm4_moe", "deepseek_v3", "deepseek_v2", "glm4_moe_lite", "glm_moe_dsa"),
    *("deepseek_v32", "qwen3_5_moe", "qwen3_next"),
)
DTYPES = (torch.float32, torch.bfloat16)
ONCE = [(family, DTYPES[place % 2]) for place, family in enumerate(FAMILIES)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"), choose(few=ONCE, usual=ONCE, every=list(itertools.product(FAMILIES, DTYPES)))
)
def test_steps_of_other_families(make_session_lab: Any, make_batch: Any, family: str, dtype: torch.dtype) -> None:
    """Dense layers, shared experts, biases, sinks, windows, chunks, norms of all heads at once; latent attention, in
    absorbed order and, with dropout, expanded; with an indexer; Gated DeltaNet, a gated shared expert."""
    batch, settings = make_batch(20, 11, 25, 1), {"dropout": 0.1 * (dtype == torch.bfloat16)}
    work = steps_of_calls([[(batch, 32), (batch, 1000)], [(batch, 1000)]], settings)
    assert_trained(*on_one_and_on(2, make_session_lab, work, dtype, family=family))


def steps_of(make_batch: Any, settings: Results, num_steps: int) -> Work:
    """What a session computes in so many steps of two calls: a batch in parts, and the first one whole."""
    batches = [make_batch(20, 11, 25, 1, seed=step % 3) for step in range(num_steps)]
    return steps_of_calls([[(batch, 32), (batches[0], 1000)] for batch in batches], settings)


def steps_of_calls(steps: list[list[tuple[Any, int]]], settings: Results) -> Work:
    """`steps`: of each its calls, a batch and how many tokens are computed at once."""

    def work(lab: Any) -> Results:
        session = lab.session(**{"fill": False, **settings})
        fill(session)
        found: Results = {}
        for step, calls in enumerate(steps):
            results = [lab.forward_backward(session, *call) for call in calls]
            found[f"losses {step}"] = [each.loss for each in results]
            found[f"logprobs {step}"] = results[0].logprobs
            if step < 2:
                found[f"gradients {step}"] = whole_gradients(session)
            clips = {"max_grad_norm": 0.5} if step % 2 else {}
            found[f"norm {step}"] = lab.step(session, 1e-2, weight_decay=0.01, **clips)
        return found | state_of(session) | {"forward": lab.forward(session, steps[0][0][0]).loss}

    return work


def assert_trained(expected: Results, ranks: list[Results]) -> None:
    assert expected["losses 1"][-1] != expected["losses 0"][-1]  # of the same batch
    for found in ranks:
        assert_same(expected, found)


ACTIVATIONS = ["recompute", "retain"]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2])
@pytest.mark.parametrize("activations", choose(few=ACTIVATIONS[1:], usual=ACTIVATIONS, every=ACTIVATIONS))
def test_losses_over_pairs_and_policies(make_session_lab: Any, pairs: Any, num_ranks: int, activations: str) -> None:
    """Forked rows, two passes over the head, the base as the reference."""
    counted = pairs.weights != 0
    sampled = np.linspace(-4, -1, len(pairs.tokens)).astype(np.float32)
    samples = Samples(np.where(counted, sampled, 0), np.where(counted, 1.5, 0).astype(np.float32))

    def work(lab: Any) -> Results:
        session = lab.session(fill=False)
        fill(session)
        found: Results = {}
        losses: list[tuple[Any, dict[str, Any]]] = [
            (PreferenceLoss(kind="sigmoid", beta=0.3), {"reference": np.linspace(-30, -20, 6).astype(np.float32)}),
            (PreferenceLoss(kind="orpo", beta=0.3), {}),
            (PolicyLoss(kind="ppo"), {"samples": samples}),
        ]
        for number, (loss, more) in enumerate(losses):
            result = lab.forward_backward(session, pairs, 64, loss, activations=activations, **more)
            found[f"{number}"] = {"loss": result.loss, "metrics": result.metrics, "correct": result.num_correct}
        found["base"] = lab.forward(session, pairs, model="base").logprobs
        return found | {"gradients": whole_gradients(session)}

    expected, ranks = on_one_and_on(num_ranks, make_session_lab, work, torch.bfloat16)
    for found in ranks:
        assert_same(expected, found)


@pytest.mark.slow
def test_a_layer_that_is_cut_has_the_bits_of_a_whole_one(make_session_lab: Any, make_batch: Any) -> None:
    batch = make_batch(20, 20, 20)

    def work(lab: Any) -> Results:
        session = lab.session(fill=False)
        fill(session)
        run_cut(session.forward_backward(batch, CrossEntropy(), 64), 20)
        return whole_gradients(session)

    def whole(lab: Any) -> Results:
        session = lab.session(fill=False)
        fill(session)
        lab.forward_backward(session, batch, 64)
        return whole_gradients(session)

    ranks = run_ranks(2, lambda exchange: work(make_session_lab(exchange, torch.float32, None)), "memory")
    for found in ranks:
        assert_same(whole(make_session_lab(None, torch.float32, None)), found)


def run_cut(slices: Any, tokens: int) -> None:
    """Grants each slice that may be cut its least part, or `tokens`."""
    granted = None
    while True:
        try:
            upcoming = slices.send(granted)
        except StopIteration:
            return
        granted = min(max(upcoming.least, tokens), upcoming.size) if upcoming.least else None


@pytest.mark.slow
def test_a_checkpoint_does_not_depend_on_the_number_of_ranks(
    make_session_lab: Any, make_batch: Any, tmp_path: Path
) -> None:
    """Saved on one, continued on two; saved on two, continued on one: the same files, the same numbers."""
    batches = [make_batch(20, 11, seed=step) for step in range(4)]

    def train(lab: Any, session: Any, some: list[Any]) -> None:
        for batch in some:
            lab.forward_backward(session, batch)
            lab.step(session, 1e-2)

    def save(lab: Any, session: Any, path: Path) -> None:
        copied = run_at_once(checkpoint.snapshot(session, optimizer=True))
        if lab.host.exchange is None or lab.host.exchange.share.rank == 0:
            checkpoint.write(path, copied, lab.twin.family, lab.host, replace=False)

    def begin(lab: Any) -> Results:
        session = lab.session(fill=False)
        train(lab, session, batches[:2])
        save(lab, session, tmp_path / f"of {lab.host.num_ranks}")
        train(lab, session, batches[2:])
        return state_of(session)

    def resume(lab: Any) -> Results:
        session = lab.session(fill=False)
        path = tmp_path / f"of {3 - lab.host.num_ranks}"
        saved = checkpoint.read(path, session, lab.twin.family, lab.host)
        run_at_once(checkpoint.restore(session, saved))
        assert (session.step, session.num_calls) == (2, 2)
        train(lab, session, batches[2:])
        return state_of(session)

    expected, ranks = on_one_and_on(2, make_session_lab, begin)
    for name in ("adapter_model.safetensors", "optimizer.safetensors", "session.json"):
        one, two = ((tmp_path / f"of {number}" / name).read_bytes() for number in (1, 2))
        assert one == two, name
    again, resumed = on_one_and_on(2, make_session_lab, resume)
    for found in (*ranks, again, *resumed):
        assert_same(expected, found)


def test_partial_sums_of_ranks_would_have_other_bits(
    make_session_lab: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the columns for backward are for: each rank's rows alone, added up afterwards, are another sum."""
    batch = make_batch(20, 11)

    def gradients(lab: Any) -> Results:
        session = lab.session(fill=False)
        fill(session)
        lab.forward_backward(session, batch)
        return whole_gradients(session)

    def partial(self: Any, by_out: torch.Tensor) -> Any:
        self.fetch()
        some, rows = by_out.split(len(self.rows), -1), self.columns[: by_out.shape[-1]].split(len(self.rows))
        return sum(one @ other for one, other in zip(some, rows, strict=True))

    monkeypatch.setattr(split.SplitWeight, "by_input", partial)
    expected, ranks = on_one_and_on(2, make_session_lab, gradients)
    for name, value in ranks[0].items():
        assert torch.allclose(expected[name], value, rtol=0, atol=3e-6), name  # 8.9e-7 measured
    with pytest.raises(AssertionError):
        assert_same(expected, ranks[0])


def test_a_rank_s_session_has_its_share_and_the_whole_a_of_dense_layers(make_session_lab: Any) -> None:
    def sizes(lab: Any) -> Results:
        session = lab.session(fill=False)
        return {name: tuple(value.shape) for name, value in session.parameters.items()}

    one, ranks = on_one_and_on(2, make_session_lab, sizes)
    for found in ranks:
        for name, shape in one.items():
            is_whole = ".experts." not in name and name.endswith("lora_A")
            assert found[name] == (shape if is_whole else (shape[0] // 2, *shape[1:])), name
