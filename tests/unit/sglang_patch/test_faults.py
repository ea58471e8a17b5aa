"""Whatever fails while the scheduler takes in or computes requests ends the request at fault, and frees what it held.

SGLang's own scheduler, in this process; memory is counted in its own pools, and by its own check when it is idle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference.resident.scheduler import Engine

PROMPTS = {"a": [11, 12, 13, 14, 15], "b": [21] * 20, "c": [31, 32, 33]}
FATAL = 99  # a token at which the test's faults strike
LONG = [50 + step for step in range(150)]  # three chunks


def quiet(scheduled: Engine) -> tuple[dict[str, list[int]], dict[str, list[float]]]:
    """What the prompts are answered when nothing fails."""
    scheduled.run(*(scheduled.request(rid, prompt) for rid, prompt in PROMPTS.items()))
    answer = scheduled.tokens, scheduled.logprobs
    scheduled.clear()
    return answer


def is_fault(reason: dict[str, Any]) -> bool:
    return reason["type"] == "abort" and reason["status_code"] == 500


WRONG: dict[str, dict[str, Any]] = {
    "overrides that are a list": {"positional_embed_overrides": [1]},
    "overrides that are a dict": {"positional_embed_overrides": {"a": 1}},
    "top_k beyond int64": {"top_k": 2**63, "temperature": 1},
    "top_k beyond int32": {"top_k": 2**31, "temperature": 1},
    "a bias that is no number": {"logit_bias": {"5": "x"}},
    "a bias of no token": {"logit_bias": {"x": 1}},
    "a session that is no object": {"session_params": {"id": "x"}},
    "no sampling parameters": {"sampling_params": None},
    "a temperature that is a text": {"temperature": None, "sampling_params": "x"},
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG.keys())
def test_a_request_that_can_not_be_taken_in_ends_alone(scheduled: Engine, changes: dict[str, Any]) -> None:
    before = scheduled.memory()
    scheduled.run(scheduled.request("wrong", [5, 6], **changes), scheduled.request("right", [5, 6]))
    assert is_fault(scheduled.ended["wrong"])
    assert scheduled.ended["right"]["type"] == "length"
    assert len(scheduled.tokens["right"]) == 8
    assert scheduled.memory() == before


def test_a_request_for_an_adapter_that_is_not_installed_ends_alone(scheduled: Engine) -> None:
    scheduled.run(scheduled.request("wrong", [5, 6], lora_id="unknown"), scheduled.request("right", [5, 6]))
    assert scheduled.ended["wrong"]["status_code"] == 404
    assert "not installed any more ('unknown')" in scheduled.ended["wrong"]["message"]
    assert scheduled.ended["right"]["type"] == "length"


@pytest.mark.slow
def test_two_hundred_of_them_leave_nothing_behind(scheduled: Engine) -> None:
    before = scheduled.memory()
    for number in range(200):
        scheduled.send(scheduled.request(f"wrong-{number}", LONG, **list(WRONG.values())[number % len(WRONG)]))
        scheduled.step()
    assert sum(map(is_fault, scheduled.ended.values())) == 200
    assert not scheduled.scheduler.waiting_queue
    assert scheduled.memory() == before


def test_an_unreadable_message_is_left_out(scheduled: Engine) -> None:
    import zmq

    from kt_runtime.sglang_patch.faults.intake import receive

    def broken(_socket: Any, _flags: int) -> Any:
        raise ValueError("not a message")

    socket: Any = None
    message = receive(broken, socket)
    scheduled.run(message, scheduled.request("right", [5, 6]))
    assert scheduled.ended["right"]["type"] == "length"

    def closed(_socket: Any, _flags: int) -> Any:
        raise zmq.Again

    with pytest.raises(zmq.Again):
        receive(closed, socket)


def test_control_requests_that_fail_are_answered_so(scheduled: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers import io_struct

    def fail(*_: Any, **__: Any) -> Any:
        raise AttributeError("not on this platform")

    monkeypatch.setattr(type(scheduled.scheduler.profiler_manager), "_profile", fail)
    monkeypatch.setattr(scheduled.scheduler.session_controller, "open", fail)
    profile = io_struct.ProfileReq(req_type=io_struct.ProfileReqType.START_PROFILE)
    scheduled.run(profile, io_struct.OpenSessionReqInput(capacity_of_str_len=10), scheduled.request("right", [5, 6]))
    told = {type(answer).__name__: answer for answer in scheduled.controls}
    assert told["ProfileReqOutput"].success is False
    assert "AttributeError" in told["ProfileReqOutput"].message
    assert told["OpenSessionReqOutput"].success is False
    assert scheduled.ended["right"]["type"] == "length"


def strike(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, is_struck: Callable[..., bool]) -> None:
    """`owner.name` raises where `is_struck(*args)`."""
    original = getattr(owner, name)

    def struck(*args: Any, **kwargs: Any) -> Any:
        if is_struck(*args):
            raise RuntimeError("struck")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, struck)


STEPS = {
    "made for a prefill": "ScheduleBatch.prepare_for_extend",
    "made for a decode step": "ScheduleBatch.prepare_for_decode",
    "computed": "TpModelWorker.forward_batch_generation",
    "its prefill taken apart": "SchedulerBatchResultProcessor.process_batch_result_prefill",
    "its decode step taken apart": "SchedulerBatchResultProcessor.process_batch_result_decode",
    "its last token looked at": "Req._check_token_based_finish",
}


def strike_step(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.managers.tp_worker import TpModelWorker

    owner, _, name = STEPS[step].partition(".")
    owners = {kind.__name__: kind for kind in (Req, ScheduleBatch, SchedulerBatchResultProcessor, TpModelWorker)}

    def is_struck(*args: Any) -> bool:
        batches = [arg for arg in args if isinstance(arg, ScheduleBatch)]
        requests = [arg for arg in args if isinstance(arg, Req)] + [req for batch in batches for req in batch.reqs]
        return any(FATAL in req.origin_input_ids for req in requests)

    strike(monkeypatch, owners[owner], name, is_struck)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("prompt", [[5, FATAL], [*LONG, FATAL]], ids=["short", "in chunks"])
def test_the_request_at_fault_ends_and_the_others_continue(
    scheduled: Engine, monkeypatch: pytest.MonkeyPatch, step: str, prompt: list[int]
) -> None:
    tokens, logprobs = quiet(scheduled)
    before = scheduled.memory()
    requests = [scheduled.request(rid, prompt) for rid, prompt in PROMPTS.items()]
    fatal = scheduled.request("fatal", prompt)
    strike_step(monkeypatch, step)
    scheduled.run(requests[0], fatal, *requests[1:])
    assert is_fault(scheduled.ended["fatal"])
    assert "RuntimeError" in scheduled.ended["fatal"]["message"]
    assert {rid: scheduled.tokens[rid] for rid in PROMPTS} == tokens
    assert {rid: scheduled.logprobs[rid] for rid in PROMPTS} == logprobs
    assert scheduled.memory() == before


CORRUPTED: dict[str, tuple[int, int, str]] = {  # argument of the step, value of its last row, what the client is told
    "id": (0, 1 << 20, "is 1048576; allowed: 0 to"),
    "negative id": (0, -1, "is -1; allowed: 0 to"),
    "position": (1, 1 << 20, "is 1048576; allowed: 0 to"),
    "slot": (2, 1 << 30, "is 1073741824"),
}


def corrupt_rows(monkeypatch: pytest.MonkeyPatch, argument: int, value: int) -> list[int]:
    """The step gets `value` as an `argument` of the fatal request's last row. Returns the sizes of such batches."""
    from sglang.srt.managers.tp_worker import TpModelWorker

    from kt_runtime.experts.step import Step

    rows: list[int] = []
    struck: list[int] = []
    compute, run = TpModelWorker.forward_batch_generation, Step.run

    def computed(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        lengths = [1 if batch.forward_mode.is_decode() else req.extend_len for req in batch.reqs]
        rows[:] = [sum(lengths[: i + 1]) - 1 for i, req in enumerate(batch.reqs) if FATAL in req.origin_input_ids]
        if rows:
            struck.append(len(batch.reqs))
        return compute(worker, batch, *args, **kwargs)

    def corrupted(step: Any, *args: Any) -> Any:
        if rows:
            args = (*args[:argument], args[argument].clone(), *args[argument + 1 :])
            args[argument][rows] = value
        return run(step, *args)

    monkeypatch.setattr(TpModelWorker, "forward_batch_generation", computed)
    monkeypatch.setattr(Step, "run", corrupted)
    return struck


@pytest.mark.parametrize("fault", CORRUPTED)
def test_a_row_that_the_step_refuses_ends_its_request_and_no_bit_of_the_others_changes(
    scheduled: Engine, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    argument, value, message = CORRUPTED[fault]
    tokens, logprobs = quiet(scheduled)
    before = scheduled.memory()
    requests = [scheduled.request(rid, prompt) for rid, prompt in PROMPTS.items()]
    struck = corrupt_rows(monkeypatch, argument, value)
    scheduled.run(requests[0], scheduled.request("fatal", [5, FATAL]), *requests[1:])
    assert struck[0] == 4 and struck[-1] == 1  # refused together with the others, then alone
    assert is_fault(scheduled.ended["fatal"])
    assert f"{fault.split()[-1]}s[" in scheduled.ended["fatal"]["message"]
    assert message in scheduled.ended["fatal"]["message"]
    assert ({rid: scheduled.tokens[rid] for rid in PROMPTS}, {rid: scheduled.logprobs[rid] for rid in PROMPTS}) == (
        tokens,
        logprobs,
    )
    assert scheduled.memory() == before


def test_a_fault_that_is_nobodys_ends_all_and_the_next_request_is_answered(
    scheduled: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.managers.tp_worker import TpModelWorker

    before = scheduled.memory()
    with monkeypatch.context() as patch:
        strike(patch, TpModelWorker, "forward_batch_generation", lambda *_: True)
        scheduled.run(*(scheduled.request(rid, prompt) for rid, prompt in PROMPTS.items()))
    assert all(is_fault(scheduled.ended[rid]) for rid in PROMPTS)
    assert scheduled.memory() == before
    scheduled.run(scheduled.request("right", [5, 6]))
    assert scheduled.ended["right"]["type"] == "length"


def test_a_lost_device_is_nobodys_fault_and_is_not_tried_again(
    scheduled: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error leaves the scheduler's loop, where `faults.lost_device` ends the process."""
    from sglang.srt.managers.tp_worker import TpModelWorker

    calls: list[Any] = []

    def lost(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    with monkeypatch.context() as patch, pytest.raises(torch.AcceleratorError):
        patch.setattr(TpModelWorker, "forward_batch_generation", lost)
        scheduled.run(*(scheduled.request(rid, prompt) for rid, prompt in PROMPTS.items()))
    assert len(calls) == 1 and not scheduled.ended


def test_a_client_that_leaves_before_its_request_joins_again_holds_nobody_up(
    scheduled: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.tp_worker import TpModelWorker

    from kt_runtime.sglang_patch.faults import batches as fault_batches

    before = scheduled.memory()
    with monkeypatch.context() as patch:
        strike(patch, TpModelWorker, "forward_batch_generation", lambda *_: True)
        scheduled.send(*(scheduled.request(rid, prompt) for rid, prompt in PROMPTS.items()))
        scheduled.step()
    fault_batches._choose_trial(scheduled.scheduler.waiting_queue)
    first, second, third = (req.rid for req in scheduled.scheduler.waiting_queue)
    scheduled.run(AbortReq(rid=first), AbortReq(rid=second))
    assert scheduled.ended[third]["type"] == "length"
    assert scheduled.memory() == before


def test_an_answer_that_can_not_be_sent_ends_alone(scheduled: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

    strike(
        monkeypatch,
        SchedulerOutputStreamer,
        "_stream_output_generation",
        lambda _, reqs, *__: any(req.rid == "fatal" for req in reqs),
    )
    scheduled.run(scheduled.request("fatal", [5, 6]), scheduled.request("right", [5, 6, 7]))
    assert is_fault(scheduled.ended["fatal"])
    assert len(scheduled.tokens["right"]) == 8
