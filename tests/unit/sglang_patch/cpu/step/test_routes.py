"""Routes of served tokens, in SGLang's own scheduler: each has its own, whoever computed it and in whichever batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from reference.cases import choose
from reference.resident.native_step import LENGTHS, adapter, installed, prompt
from reference.resident.scheduler import Engine

from kt_runtime.families import family_for
from kt_runtime.resident.config import ENVIRONMENT_VARIABLE, ResidentSettings
from kt_runtime.resident.routes.keys import BASE, TokenKeys
from kt_runtime.resident.routes.store import RouteStore
from kt_runtime.sglang_patch.cpu import routes
from kt_runtime.sglang_patch.cpu import step as native_step
from kt_runtime.sglang_patch.hooks import Hooks

SERVED = ["bfloat16, portable", "DeepSeek-V3, float32"]
pytestmark = pytest.mark.parametrize("served", choose(few=["float32"], usual=SERVED, every=SERVED), indirect=True)
SIZE, NAN_TOKEN = 1 << 20, 700


@pytest.fixture
def store(served: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[RouteStore]:
    """A scheduler that keeps routes, as the hook of `serve --routing-replay` does."""
    served.clear()
    scheduler = served.scheduler
    run_batch = scheduler.run_batch

    def keeping(batch: object, *args: object) -> object:
        result = run_batch(batch, *args)
        routes._keep(result, scheduler, batch, *args)
        return result

    monkeypatch.setattr(scheduler, "run_batch", keeping)
    opened = routes.open_store(served.config, SIZE)
    assert opened is not None
    yield opened
    routes.open_store(served.config, 0)


def routes_of(store: RouteStore, tokens: Sequence[int], version: str = BASE) -> npt.NDArray[np.int64]:
    """[T, M, K]; -1 for a token that is not known."""
    known, ids = store.find(TokenKeys(version).extend(tokens))
    return np.where(known[:, None, None], ids.astype(np.int64), -1)


def sequence(served: Engine, rid: str, length: int) -> list[int]:
    """Prompt and answer, without the last token, which nobody has computed."""
    return [*prompt(length, length), *served.tokens[rid][:-1]]


def test_the_step_and_the_modules_keep_the_same_routes_of_prompts_and_answers(
    served: Engine, store: RouteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for length in LENGTHS[2:]:
        served.run(served.request(f"r{length}", prompt(length, length)))
    sequences = [sequence(served, f"r{length}", length) for length in LENGTHS[2:]]
    found = [routes_of(store, tokens) for tokens in sequences]
    family, config = family_for(served.config), served.config
    layers, top_k = len(family.moe_layers(config)), family.num_experts_per_tok(config)
    for tokens, ids in zip(sequences, found, strict=True):
        assert ids.shape == (len(tokens), layers, top_k)
        assert ids.min() >= 0 and ids.max() < family.expert_shape(config)[0]
        assert (np.diff(np.sort(ids, axis=-1), axis=-1) > 0).all(), "a token's experts are different ones"
    assert len({ids.tobytes() for one in found for ids in one}) > 100, "tokens have routes of their own"
    modules = routes.open_store(served.config, SIZE)
    assert modules is not None
    monkeypatch.setattr(native_step, "_program", None)
    served.clear()
    for length in LENGTHS[2:]:
        served.run(served.request(f"r{length}", prompt(length, length)))
    again = [routes_of(modules, sequence(served, f"r{length}", length)) for length in LENGTHS[2:]]
    assert all(np.array_equal(a, b) for a, b in zip(found, again, strict=True))


def test_chunks_mixed_batches_and_cached_prefixes_keep_each_request_s_own_routes(
    served: Engine, store: RouteStore
) -> None:
    alone = {}
    for length in LENGTHS:
        served.run(served.request(f"alone{length}", prompt(length, length)))
        alone[length] = routes_of(store, sequence(served, f"alone{length}", length))
    together = routes.open_store(served.config, SIZE)
    assert together is not None
    served.clear()
    served.send(*(served.request(f"r{length}", prompt(length, length)) for length in LENGTHS[:3]))
    for _ in range(3):
        served.step()
    served.run(*(served.request(f"r{length}", prompt(length, length)) for length in LENGTHS[3:]))
    for length in LENGTHS:
        assert np.array_equal(routes_of(together, sequence(served, f"r{length}", length)), alone[length])
    before = len(together)
    served.run(served.request("again", prompt(150, 150)))  # all but the last page comes from the cache
    assert served.cached_tokens() > 100 and len(together) == before
    served.run(served.request("longer", [*prompt(150, 150), 9, 8, 7]))
    longer = routes_of(together, [*prompt(150, 150), 9, 8, 7])
    assert (longer >= 0).all() and np.array_equal(longer[:150], alone[150][:150])


def test_an_adapter_s_routes_are_kept_under_its_version(served: Engine, store: RouteStore) -> None:
    served.run(served.request("base", prompt(33, 33)))
    with installed(served, a=adapter(served, 4, seed=5)):
        served.run(served.request("adapted", prompt(33, 33), lora_id="a"))
        served.run(served.request("nameless", prompt(20, 20), lora_id="a"))
    base, adapted = (routes_of(store, prompt(33, 33), version) for version in (BASE, "content of a"))
    assert (base >= 0).all() and (adapted >= 0).all() and not np.array_equal(base, adapted)
    assert (routes_of(store, prompt(20, 20)) == -1).all() and (routes_of(store, prompt(33, 33), "b") == -1).all()


def test_a_request_that_is_computed_again_keeps_its_routes(served: Engine, store: RouteStore) -> None:
    """As after SGLang's retraction: its keys start from its tokens again."""
    served.run(served.request("once", prompt(40, 40)))
    wanted = routes_of(store, sequence(served, "once", 40))
    fresh = routes.open_store(served.config, SIZE)
    assert fresh is not None
    served.clear()
    served.send(served.request("r", prompt(40, 40)))
    served.step()
    served.step()
    batch = served.scheduler.running_batch
    batch.reqs[0].kt_token_keys = TokenKeys(BASE)  # of another length than the request has computed
    served.run()
    assert np.array_equal(routes_of(fresh, sequence(served, "r", 40)), wanted)


def test_a_server_that_keeps_no_routes_makes_none(served: Engine) -> None:
    served.clear()
    served.run(served.request("r", prompt(20, 20)))
    assert routes.rows() is None


@pytest.mark.parametrize(("size", "hooked"), [(0, []), (1 << 20, [routes.SYMBOLS[0]])])
def test_only_a_server_that_keeps_routes_is_hooked(
    served: Engine, size: int, hooked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ResidentSettings(
        model="m", model_directory="d", wire_address="w", names_address="n", adapter_directory="a", route_bytes=size
    )
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, settings.to_environment()[ENVIRONMENT_VARIABLE])
    asked: list[str] = []
    hooks = Hooks(on_cpu=True)
    monkeypatch.setattr(hooks, "after", lambda target, hook: asked.append(target))
    routes.install(hooks)
    assert asked == hooked
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    routes.install(hooks)
    assert asked == hooked


def test_a_token_that_is_not_finite_has_no_routes(served: Engine, store: RouteStore) -> None:
    tokens = [*prompt(9), NAN_TOKEN, 5]
    weight = served.scheduler.tp_worker.model_runner.model.model.embed_tokens.weight
    before = weight[NAN_TOKEN].clone()
    with torch.no_grad():
        weight[NAN_TOKEN] = float("nan")
    try:
        served.run(served.request("bad", tokens))
    finally:
        with torch.no_grad():
            weight[NAN_TOKEN] = before
    known = np.all(routes_of(store, tokens) >= 0, axis=(1, 2))
    assert known[:9].all() and not known[9:].any()
