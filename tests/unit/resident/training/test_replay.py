"""Routing replay in training: recorded experts with present weights, against the plain model with a forced choice.

Routes are recorded from the twin itself, whose routing is serving's to the bit (tests/system).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from reference.resident.configs import FAMILIES

from kt_runtime.resident.routes.keys import BASE, TokenKeys
from kt_runtime.resident.routes.store import RouteStore
from kt_runtime.resident.scheduler import run_at_once
from kt_runtime.resident.training.replay import CallRoutes, find_routes
from kt_runtime.resident.twin import routed
from kt_runtime.resident.twin.batches import TrainingBatch
from kt_runtime.resident.twin.replay import LayerRoutes
from kt_runtime.resident.twin.routed import RoutedExperts
from kt_runtime.wire.messages import PreferenceLoss

TOP_K = 2
Ids = npt.NDArray[np.int32]


@pytest.fixture(params=FAMILIES)
def host(request: pytest.FixtureRequest, make_host: Callable[..., Any]) -> Any:
    """Of each family, on a CPU: only there are routes replayed."""
    return make_host(request.param, attends_in_float32=True)


@contextmanager
def chosen_experts(lab: Any) -> Iterator[list[torch.Tensor]]:
    """The ids [T, K] with which each layer with routed experts computes, in order."""
    seen: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        forward = RoutedExperts.forward

        def spy(module: RoutedExperts, hidden: Any, ids: torch.Tensor, weights: Any) -> torch.Tensor:
            seen.append(ids.clone())
            return forward(module, hidden, ids, weights)

        patch.setattr(RoutedExperts, "forward", spy)
        yield seen


def sequences(batch: TrainingBatch) -> list[TrainingBatch]:
    ends = np.cumsum(batch.lengths)
    starts = ends - batch.lengths
    return [
        TrainingBatch([length], batch.tokens[start:end], batch.targets[start:end], batch.weights[start:end])
        for start, end, length in zip(starts, ends, batch.lengths, strict=True)
    ]


def routes_of(lab: Any, session: Any, batch: TrainingBatch, **options: Any) -> list[Ids]:
    """[T, M, K] of each sequence, computed alone."""
    found = []
    for alone in sequences(batch):
        with chosen_experts(lab) as seen:
            lab.forward(session, alone, **options)
        found.append(torch.stack(seen, dim=1).numpy())
    return found


def store_for(lab: Any, tokens: int = 400) -> RouteStore:
    layers, experts = len(lab.twin.routed_layers), 8
    return RouteStore(layers, TOP_K, experts, tokens * RouteStore.bytes_of_token(layers, TOP_K, experts))


def recorded(lab: Any, session: Any, batch: TrainingBatch, version: str = "v1") -> RouteStore:
    store = store_for(lab)
    for alone, ids in zip(sequences(batch), routes_of(lab, session, batch), strict=True):
        store.put(TokenKeys(version).extend(alone.tokens), ids)
    return store


def replayed(store: RouteStore, batch: TrainingBatch, *versions: str, forced: bool = True) -> CallRoutes:
    found: CallRoutes = run_at_once(find_routes(store, versions or ["v1"], batch, forced=forced))
    return found


def move(lab: Any, session: Any, batch: TrainingBatch) -> None:
    """Steps after which the router chooses other experts for some tokens."""
    for _ in range(3):
        lab.forward_backward(session, batch)
        lab.step(session, 5e-3)
    session.gradient.clear()


def share(metrics: dict[str, float], name: str, batch: TrainingBatch) -> float:
    return metrics[f"routes/{name}"] / len(batch.tokens)


@pytest.mark.parametrize("max_tokens", [32, 1000], ids=["three microbatches", "one microbatch"])
@pytest.mark.parametrize("activations", ["recompute", "retain"])
def test_routes_of_unchanged_weights_give_the_bits_of_live_routing(
    lab: Any, batch: TrainingBatch, max_tokens: int, activations: str
) -> None:
    session, other = lab.session(), lab.session()
    store = recorded(lab, session, batch)
    plain = lab.forward_backward(session, batch, max_tokens, activations=activations)
    result = lab.forward_backward(other, batch, max_tokens, activations=activations, routes=replayed(store, batch))
    assert result.metrics == {"routes/replayed": len(batch.tokens), "routes/missed": 0, "routes/moved": 0}
    assert torch.equal(result.logprobs, plain.logprobs) and result.loss == plain.loss
    assert all(torch.equal(other.gradient[name], session.gradient[name]) for name in session.gradient)
    assert plain.metrics == {}


@pytest.mark.slow
def test_after_steps_the_recorded_experts_compute_with_present_weights(lab: Any, batch: TrainingBatch) -> None:
    session = lab.session()
    store, old = recorded(lab, session, batch), routes_of(lab, session, batch)
    move(lab, session, batch)
    live = lab.forward(session, batch)
    compared = lab.forward(session, batch, routes=replayed(store, batch, forced=False))
    assert torch.equal(compared.logprobs, live.logprobs)
    assert share(compared.metrics, "replayed", batch) == 0
    assert 0.05 < share(compared.metrics, "moved", batch) < 1
    forced = lab.forward(session, batch, routes=replayed(store, batch))
    assert share(forced.metrics, "replayed", batch) == 1 and forced.metrics["routes/moved"] > 0
    assert not torch.equal(forced.logprobs, live.logprobs)
    new = routes_of(lab, session, batch)
    assert any((np.sort(a) != np.sort(b)).any() for a, b in zip(old, new, strict=True))
    for alone, ids in zip(sequences(batch), old, strict=True):
        with chosen_experts(lab) as seen:
            lab.forward_backward(session, alone, routes=replayed(store, alone))
        forward, backward = seen[: len(seen) // 2], seen[len(seen) // 2 :][::-1]
        for passed in (forward, backward):
            assert np.array_equal(torch.stack(passed, dim=1).numpy(), ids)
    after = lab.forward(session, batch)
    assert torch.equal(after.logprobs, live.logprobs) and after.metrics == {}


@contextmanager
def forced_choice(lab: Any, ids: Ids) -> Iterator[None]:
    """Hugging Face's model takes these experts [T, M, K]; the weights by the families' formulas, for autograd."""
    config = lab.host.config

    def force(place: int) -> Callable[..., Any]:
        def hook(gate: Any, args: Any, output: Any) -> Any:
            given = torch.from_numpy(ids[:, place]).long()
            is_sigmoid = config.get("scoring_func") == "sigmoid"
            scores = output[0].float().sigmoid() if is_sigmoid else output[0].float().softmax(-1)
            weights = scores.gather(-1, given)
            if config["norm_topk_prob"]:
                weights = weights / weights.sum(-1, keepdim=True)
            return (output[0], weights * config.get("routed_scaling_factor", 1.0), given)

        return hook

    with ExitStack() as hooks:
        for place, layer in enumerate(lab.twin.routed_layers):
            gate = lab.host.hf.model.layers[layer].mlp.gate
            handle = gate.register_forward_hook(force(place))
            hooks.callback(handle.remove)
        yield


def errors(lab: Any, session: Any, batch: TrainingBatch, store: RouteStore, ids: Ids) -> tuple[float, float]:
    """(relative error of the loss, largest of the gradients) against plain autograd with the forced choice."""
    session.gradient.clear()
    result = lab.forward_backward(session, batch, routes=replayed(store, batch))
    values = {name: value.detach().clone().requires_grad_() for name, value in session.parameters.items()}
    with forced_choice(lab, ids):
        loss = lab.plain_loss(session, values, batch)
    loss.backward()
    worst = 0.0
    for name, value in values.items():
        assert value.grad is not None and value.grad.norm() > 0, name
        worst = max(worst, float((session.gradient[name] - value.grad).norm() / value.grad.norm()))
    return abs(result.loss / float(loss.detach()) - 1), worst


def test_loss_and_gradients_are_those_of_the_plain_model_with_the_same_choice(
    lab: Any, make_batch: Callable[..., TrainingBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same comparison sees weights that are replayed too, and gradients that do not pass through the weights."""
    session, batch = lab.session(), make_batch(40)
    store, (ids,) = recorded(lab, session, batch), routes_of(lab, session, batch)
    stale = weights_of(lab, session, batch)
    move(lab, session, batch)
    loss, gradients = errors(lab, session, batch, store, ids)
    print(f"{lab.twin.family.name}: loss {loss:.1e}, gradients {gradients:.1e}")
    assert loss <= 2e-6 and gradients <= 2e-5
    for fault in (planted_weights(stale), detached_weights):
        with monkeypatch.context() as patch:
            for name in ("softmax_top_k", "grouped_top_k"):
                patch.setattr(routed, name, fault(getattr(routed, name)))
            loss, gradients = errors(lab, session, batch, store, ids)
        assert gradients > 1e-3, f"{fault}: {loss:.1e}, {gradients:.1e}"


def weights_of(lab: Any, session: Any, batch: TrainingBatch) -> list[torch.Tensor]:
    """[T, K] of each layer with routed experts."""
    seen: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        forward = RoutedExperts.forward

        def spy(module: RoutedExperts, hidden: Any, ids: Any, weights: torch.Tensor) -> torch.Tensor:
            seen.append(weights.clone())
            return forward(module, hidden, ids, weights)

        patch.setattr(RoutedExperts, "forward", spy)
        lab.forward(session, batch)
    return seen


def planted_weights(stale: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """A router that replays the weights too: forward from the first layer on, backward from the last."""
    order = [*stale, *stale[::-1]]

    def fault(original: Callable[..., Any]) -> Callable[..., Any]:
        def top_k(logits: torch.Tensor, *settings: Any) -> Any:
            weights, ids = original(logits, *settings)
            if not isinstance(settings[-1], torch.Tensor):
                return weights, ids
            order.append(order.pop(0))
            return weights * 0 + order[-1], ids

        return top_k

    return fault


def detached_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    def top_k(logits: torch.Tensor, *settings: Any) -> Any:
        weights, ids = original(logits, *settings)
        return weights.detach(), ids

    return top_k


@pytest.mark.slow
def test_tokens_without_routes_are_routed_as_always(lab: Any, batch: TrainingBatch) -> None:
    session = lab.session()
    full = recorded(lab, session, batch)
    move(lab, session, batch)
    live = lab.forward(session, batch)
    empty = lab.forward(session, batch, routes=replayed(store_for(lab), batch))
    assert empty.metrics == {"routes/replayed": 0, "routes/missed": len(batch.tokens), "routes/moved": 0}
    other_version = lab.forward(session, batch, routes=replayed(full, batch, "v2"))
    assert other_version.metrics == empty.metrics
    assert torch.equal(empty.logprobs, live.logprobs) and torch.equal(other_version.logprobs, live.logprobs)
    partly = store_for(lab)
    alone = sequences(batch)[1]
    keys = TokenKeys("v1").extend(alone.tokens)[:10]
    partly.put(keys, full.find(keys)[1])
    with chosen_experts(lab) as seen:
        result = lab.forward(session, alone, routes=replayed(partly, alone))
    assert result.metrics["routes/replayed"] == 10 and result.metrics["routes/missed"] == len(alone.tokens) - 10
    with chosen_experts(lab) as present:
        lab.forward(session, alone)
    assert torch.equal(seen[0][10:], present[0][10:])  # of the first layer, whose inputs are those of live routing
    assert np.array_equal(torch.stack(seen, 1)[:10].numpy(), full.find(keys)[1])


def test_pairs_that_share_their_prompt_replay_it_once(lab: Any, make_pairs: Callable[..., TrainingBatch]) -> None:
    session, pairs = lab.session(), make_pairs((9, 5, 7), (4, 6, 2))
    loss = PreferenceLoss(kind="simpo", beta=1.0)
    store = recorded(lab, session, pairs)
    plain = lab.forward(session, pairs, loss=loss)
    again = lab.forward(session, pairs, loss=loss, routes=replayed(store, pairs))
    assert torch.equal(again.logprobs, plain.logprobs)
    assert (again.metrics["routes/missed"], again.metrics["routes/moved"]) == (0, 0)


def test_a_sequence_takes_the_routes_of_the_version_that_has_computed_most_of_it(
    lab: Any, make_batch: Callable[..., TrainingBatch]
) -> None:
    batch = make_batch(6, 4)
    store, layers = store_for(lab), len(lab.twin.routed_layers)
    one, two = (alone.tokens for alone in sequences(batch))
    for version, tokens, expert in (("old", one, 1), ("new", one[:3], 2), ("new", two, 3), ("old", two, 4)):
        store.put(TokenKeys(version).extend(tokens), np.full((len(tokens), layers, TOP_K), expert))
    found = replayed(store, batch, "new", "old", BASE)
    assert found.known.all() and found.ids[:, 0, 0].tolist() == [1] * 6 + [3] * 4
    assert replayed(store, batch, BASE).known.sum() == 0
    assert (store.status().found_tokens, store.status().missed_tokens) == (10, 10)


def test_long_calls_are_looked_up_in_slices(lab: Any, make_batch: Callable[..., TrainingBatch]) -> None:
    batch, versions = make_batch(*[250] * 20), [f"v{index}" for index in range(4)]
    slices = list(find_routes(store_for(lab), versions, batch, forced=True))
    assert len(slices) == 20 * 250 * 4 // 4096 and {each.kind for each in slices} == {"routes"}


def test_moved_are_known_tokens_with_another_set_of_experts_whatever_their_order() -> None:
    routes = LayerRoutes(
        ids=torch.tensor([[0, 1], [1, 2], [2, 3], [4, 5]]),
        known=torch.tensor([True, True, False, True]),
        forced=True,
        moved=torch.zeros(4, dtype=torch.bool),
    )
    chosen = torch.tensor([[1, 0], [1, 3], [0, 1], [4, 5]], dtype=torch.int32)
    ids = routes.instead_of(chosen)
    assert ids is not None and ids.tolist() == [[0, 1], [1, 2], [0, 1], [4, 5]] and ids.dtype == torch.int32
    assert routes.moved.tolist() == [False, True, False, False]


def test_a_session_s_samplers_are_its_latest_versions_or_the_base(deepseek_lab: Any) -> None:
    session = deepseek_lab.session()
    assert session.samplers == [BASE]
    for version in [*(f"v{index}" for index in range(10)), "v4"]:
        session.note_published(version)
    assert session.samplers == ["v4", "v9", "v8", "v7", "v6", "v5", "v3", "v2"]
