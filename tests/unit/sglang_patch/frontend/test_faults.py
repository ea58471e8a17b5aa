"""An exception in the frontend's loop ends the requests of its message, and the loop continues. Without a server."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

pytestmark = pytest.mark.usefixtures("patched_sglang")


class State:
    """What SGLang keeps of a request."""

    def __init__(self) -> None:
        self.event, self.output_ids, self.finished = asyncio.Event(), [1, 2], False
        self.out_list: list[Any] = []
        self.time_stats = SimpleNamespace(set_finished_time=lambda: None)

    def get_text(self) -> str:
        return "so far"


def containment(monkeypatch: pytest.MonkeyPatch, messages: list[Any]) -> Any:
    """A manager without processes that receives `messages`, then finds its socket closed."""
    from kt_runtime.sglang_patch.frontend import faults as frontend_faults

    manager = object.__new__(frontend_faults.FaultContainment)
    manager.rid_to_state, manager.aborted, manager.released = {}, [], []
    manager.soft_watchdog = SimpleNamespace(disable=contextlib.nullcontext, feed=lambda: None)
    manager.recv_from_detokenizer = None
    manager.abort_request = manager.aborted.append
    manager._release_lora_once = manager.released.append
    waiting = iter(messages)

    async def receive(_socket: Any) -> Any:
        message = next(waiting, zmq.ZMQError())
        if isinstance(message, Exception):
            raise message
        return message

    monkeypatch.setattr(frontend_faults, "async_sock_recv", receive)
    return manager


def run(manager: Any) -> None:
    with pytest.raises(zmq.ZMQError):
        asyncio.run(manager.handle_loop())


def test_a_message_that_fails_ends_its_requests_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[Any] = []

    def dispatch(message: Any) -> None:
        handled.append(message.rid)
        if message.rid == "bad":
            raise RuntimeError("inside")

    manager = containment(monkeypatch, [SimpleNamespace(rid=rid) for rid in ("bad", "good")])
    manager._result_dispatcher = dispatch
    bad, good = State(), State()
    manager.rid_to_state = {"bad": bad, "good": good}
    run(manager)
    assert handled == ["bad", "good"]
    assert manager.rid_to_state == {"good": good}
    assert manager.aborted == ["bad"]
    assert manager.released == [bad]
    assert bad.finished
    assert bad.event.is_set()
    reason = bad.out_list[-1]["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"]) == ("abort", 500)
    assert "RuntimeError" in reason["message"]
    assert "inside" not in reason["message"]  # it may hold anything
    assert not good.event.is_set()


def test_an_answer_that_was_given_before_the_exception_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from kt_runtime.sglang_patch.frontend import faults as frontend_faults

    class Message:
        rids = ("done", "failing", "later")

    async def handle(_manager: Any, _message: Any) -> None:
        done.finished = True
        done.out_list.append("the answer")
        del manager.rid_to_state["done"]
        raise KeyError("of the second")

    monkeypatch.setattr(frontend_faults, "BATCH_OUTPUTS", (Message,))
    monkeypatch.setattr(frontend_faults.FaultContainment, "_handle_batch_output", handle)
    manager = containment(monkeypatch, [Message()])
    done, failing, later = State(), State(), State()
    manager.rid_to_state = {"done": done, "failing": failing, "later": later}
    run(manager)
    assert done.out_list == ["the answer"]
    assert done.event.is_set()
    assert manager.aborted == ["failing", "later"]
    assert failing.event.is_set()
    assert later.event.is_set()


def test_a_message_that_can_not_be_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[Any] = []
    manager = containment(monkeypatch, [EOFError("torn"), SimpleNamespace(rid="next")])
    manager._result_dispatcher = handled.append
    run(manager)
    assert [message.rid for message in handled] == ["next"]


def test_labels_that_prometheus_refuses_are_not_counted_and_the_answer_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = containment(monkeypatch, [])
    manager.metrics_collector = SimpleNamespace(labels={})
    manager.enable_priority_scheduling = False
    state = SimpleNamespace(obj=SimpleNamespace(custom_labels=5))
    manager.collect_metrics(state, SimpleNamespace(rids=["one"], completion_tokens=[1]), 0)


def test_a_request_whose_log_probabilities_fail_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = containment(monkeypatch, [])
    message = SimpleNamespace(rids=["one", "two"], finished_reasons=[None, None], input_token_logprobs_val=5)
    meta_info: dict[str, Any] = {}
    manager.convert_logprob_style(meta_info, State(), [5], None, False, message, 1, finished=False)
    assert message.finished_reasons[0] is None
    assert message.finished_reasons[1] == meta_info["finish_reason"]
    assert meta_info["finish_reason"]["status_code"] == 500
    assert manager.aborted == ["two"]


def test_a_request_with_more_log_probabilities_than_it_may_have_ends_with_400(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    manager = containment(monkeypatch, [])
    monkeypatch.setattr(TokenizerManager, "convert_logprob_style", lambda *_args, **_kwargs: None)
    message = SimpleNamespace(rids=["one"], finished_reasons=[None])
    asked = SimpleNamespace(
        top_logprobs_num=9, token_ids_logprob=None, stream=False, return_text_in_logprobs=True, most_logprobs=100
    )
    state = SimpleNamespace(obj=asked, output_token_logprobs_val=[0.0] * 10, input_token_logprobs_val=[])
    meta_info: dict[str, Any] = {}
    manager.convert_logprob_style(meta_info, state, 9, None, True, message, 0, finished=False)
    assert not meta_info
    assert not manager.aborted
    state.output_token_logprobs_val.append(0.0)
    manager.convert_logprob_style(meta_info, state, 9, None, True, message, 0, finished=False)
    assert meta_info["finish_reason"] == message.finished_reasons[0]
    assert (meta_info["finish_reason"]["type"], meta_info["finish_reason"]["status_code"]) == ("abort", 400)
    assert "11 tokens with 10 log-probabilities each" in meta_info["finish_reason"]["message"]
    assert manager.aborted == ["one"]
