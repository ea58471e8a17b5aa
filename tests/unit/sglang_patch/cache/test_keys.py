"""Requests are kept under their adapter's content, in SGLang's own `Req`, `Session` and `StreamingSession`."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kt_runtime.resident.config import ENVIRONMENT_VARIABLE, ResidentSettings
from kt_runtime.sglang_patch.cache import keys as cache_keys
from kt_runtime.sglang_patch.cache.keys import cache_key, forget, register

ONE, TWO = "1" * 64, "2" * 64
SETTINGS = ResidentSettings(model="m", model_directory="d", wire_address="w", names_address="n", adapter_directory="a")


class Registered:
    """Collects what `install` hooks, as kt_runtime.sglang_patch.hooks.Hooks."""

    def __init__(self) -> None:
        self.hooks: list[tuple[str, str, Callable[..., Any]]] = []

    def after(self, target: str, hook: Callable[..., Any]) -> None:
        self.hooks.append((target, "AFTER", hook))

    def around(self, target: str, hook: Callable[..., Any]) -> None:
        self.hooks.append((target, "AROUND", hook))

    def before(self, target: str, hook: Callable[..., Any]) -> None:
        self.hooks.append((target, "BEFORE", hook))


@pytest.fixture
def hooked(patched_sglang: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hooks as `kt-runtime serve` sets them, applied by SGLang's own wrapper, for one test."""
    import pkgutil

    from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

    monkeypatch.setenv(ENVIRONMENT_VARIABLE, SETTINGS.to_environment()[ENVIRONMENT_VARIABLE])
    registered = Registered()
    cache_keys.install(registered)  # type: ignore[arg-type]
    assert len(registered.hooks) == 3
    for target, kind, hook in registered.hooks:
        owner, _, name = target.rpartition(".")
        parent = pkgutil.resolve_name(owner)
        monkeypatch.setattr(parent, name, _wrap_fn(getattr(parent, name), hook, HookType[kind]))
    register("a" * 32, ONE)
    register("b" * 32, ONE)
    register("c" * 32, TWO)
    yield
    for letter in "abc":
        forget(letter * 32)


def made(lora_id: str | None = None, extra_key: str | None = None, **more: Any) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(max_new_tokens=1)
    return Req("rid", "", array("q", [1, 2, 3]), sampling, lora_id=lora_id, extra_key=extra_key, vocab_size=8, **more)


def test_nothing_is_hooked_outside_of_our_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    registered = Registered()
    cache_keys.install(registered)  # type: ignore[arg-type]
    assert registered.hooks == []


def test_the_same_content_shares_under_every_id_and_other_content_does_not(hooked: None) -> None:
    a, b, c, base = (made(lora_id) for lora_id in ("a" * 32, "b" * 32, "c" * 32, None))
    assert a.extra_key == b.extra_key == f"kt1|{ONE}|-"
    assert c.extra_key == f"kt1|{TWO}|-"
    assert base.extra_key == "kt1|base|-"
    assert (a.lora_id, b.lora_id) == ("a" * 32, "b" * 32)


def test_a_client_that_sends_an_adapters_id_or_key_gets_what_is_its_own(hooked: None) -> None:
    adapters = {made(lora_id).extra_key for lora_id in ("a" * 32, "c" * 32)}
    sent = ["a" * 32, ONE, f"kt1|{ONE}|-", "kt1|base|-", "-", "base", f"{ONE}|-"]
    keys = [made(None, extra_key).extra_key for extra_key in sent]
    keys += [made("c" * 32, extra_key).extra_key for extra_key in sent]
    assert len(set(keys)) == 2 * len(sent)
    assert adapters.isdisjoint(keys)
    assert made(None, "").extra_key == made(None).extra_key
    assert made("a" * 32, "a" * 32).extra_key == made("b" * 32, "a" * 32).extra_key != made("a" * 32).extra_key


def test_a_salt_stays_a_part_of_its_own(hooked: None) -> None:
    request = made("a" * 32, cache_salt="salt")
    assert (request.extra_key, request.cache_salt) == (f"kt1|{ONE}|-", "salt")


def test_an_adapter_that_was_not_registered_shares_with_nobody(hooked: None) -> None:
    forget("a" * 32)
    keys = {made(lora_id).extra_key for lora_id in ("a" * 32, "b" * 32, "d" * 32, None)}
    assert len(keys) == 4


key_parts = st.tuples(st.sampled_from([None, "x", "y", "z"]), st.none() | st.text(max_size=6))


@given(st.lists(key_parts, max_size=8))
def test_keys_are_equal_exactly_when_content_and_the_clients_key_are(
    parts: list[tuple[str | None, str | None]],
) -> None:
    register("x", ONE)
    register("y", ONE)
    try:
        meant = {(ONE if lora_id in ("x", "y") else lora_id, own or None) for lora_id, own in parts}
        assert len({cache_key(lora_id, own) for lora_id, own in parts}) == len(meant)
    finally:
        forget("x")
        forget("y")


class Turn(SimpleNamespace):
    """A request as it arrives; what is not given is None, as in SGLang's own."""

    return_hidden_states = False

    def __getattr__(self, name: str) -> None:
        return None


def test_every_turn_of_a_session_is_rewritten_once_aborted_ones_too(hooked: None) -> None:
    from sglang.srt.managers.io_struct import SessionParams
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.session.session_controller import Session

    session = Session(100, "s")

    def turn(rid: str, after: str | None, **fields: Any) -> Any:
        params, sampling = SessionParams(id="s", rid=after), SamplingParams(max_new_tokens=1)
        ids = array("q", [1, 2, 3])
        arrived = Turn(rid=rid, input_ids=ids, sampling_params=sampling, session_params=params, **fields)
        return session.create_req(arrived, None, 8)

    first = turn("1", None, lora_id="a" * 32)
    first.finished_reason = FINISH_ABORT("done")
    second = turn("2", "1", lora_id="c" * 32, extra_key="mine")
    assert first.extra_key == f"kt1|{ONE}|-"
    assert second.extra_key == cache_key("c" * 32, "mine")
    with get_parallel().override(tp_rank=0):
        lost = turn("3", "unknown", extra_key=f"kt1|{ONE}|-")
    assert lost.to_finish is not None
    assert lost.extra_key == cache_key(None, f"kt1|{ONE}|-")


class Tree:
    """What `StreamingSession` needs of the cache when a slot is released."""

    page_size = 1

    def __init__(self) -> None:
        self.freed: list[Any] = []
        self.req_to_token_pool = SimpleNamespace(free=self.freed.append)

    def unlock(self, lock: Any) -> None:
        pass

    def free_kv_row(self, kv: Any, ranges: Any) -> None:
        pass


@pytest.fixture
def streaming(hooked: None) -> Any:
    from sglang.srt.session.streaming_session import StreamingSession

    return StreamingSession(Tree())


def streamed(lora_id: str | None, **more: Any) -> Any:
    request = made(lora_id, **more)
    request.session = SimpleNamespace(session_id="s", streaming=True)
    return request


def reused_tokens(streaming: Any, request: Any) -> int:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    result = streaming.try_match_prefix(MatchPrefixParams(key=[1, 2, 3], req=request))
    return 0 if result is None else int(result.device_prefix_len)


@pytest.fixture
def first_turn(streaming: Any) -> Any:
    request = streamed("a" * 32)
    request.kv.req_pool_idx = 0
    request.kv.kv_committed_len = request.kv.kv_allocated_len = 2
    streaming.take(request)
    return request


def test_a_streaming_session_continues_with_the_same_content(streaming: Any, first_turn: Any) -> None:
    request = streamed("b" * 32)
    assert reused_tokens(streaming, request) == 2
    streaming.take(request)
    assert streaming.cache.freed == []
    assert reused_tokens(streaming, streamed("a" * 32)) == 2


@pytest.mark.parametrize("other", [("c" * 32, {}), (None, {}), ("a" * 32, {"cache_salt": "x"})])
def test_a_streaming_session_forgets_what_another_content_computed(
    streaming: Any, first_turn: Any, other: tuple[str | None, dict[str, str]]
) -> None:
    lora_id, more = other
    assert reused_tokens(streaming, streamed(lora_id, **more)) == 0
    assert len(streaming.cache.freed) == 1
    assert streaming.slots == {}


def test_requests_without_a_streaming_session_pass(streaming: Any) -> None:
    assert reused_tokens(streaming, made("a" * 32)) == 0
    streaming.take(made("a" * 32))
    assert streaming.slots == {}
