from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.cases import examples

from kt_runtime.errors import InvalidValueError, ProtocolError
from kt_runtime.wire import codec, messages, replies
from kt_runtime.wire.codec import FrameError, Limits
from kt_runtime.wire.messages import Forward, ForwardBackward, GetStatus, OptimStep, PreferenceLoss
from kt_runtime.wire.replies import ForwardReply
from kt_runtime.wire.settings import Settings
from kt_runtime.wire.status import SessionInfo

LORA = messages.LoraSettings(rank=8, alpha=16.0, dropout=0.1, targets=["attention", "experts"], seed=7)
INFO = SessionInfo(session="s", rank=8, alpha=16.0, step=3, modules=["q_proj"], num_parameters=64)
FORWARD = ForwardBackward(request_id="c-1", session="s", lengths=[2, 1])
DPO = PreferenceLoss(kind="sigmoid", beta=0.1, label_smoothing=0.2, ftx=0.5, scale=0.25)
PAIR = ForwardBackward(request_id="c-1", session="s", lengths=[2, 1], loss=DPO, activations="retain")
ARRAYS = {
    "tokens": np.array([1, 2, 3], np.int32),
    "targets": np.array([2, 3, 2**31 - 1], np.int32),
    "weights": np.array([0.0, 0.5, -1.0], np.float32),
}
REFERENCE = np.array([-10.5, -3.0], np.float32)
REQUESTS = [
    GetStatus(request_id="c-1"),
    messages.CreateSession(request_id="c-1", session="s", lora=LORA, start_from="/a/ü", reference="/b"),
    Forward(request_id="c-1", session="s", lengths=[2, 1], model="base"),
    Forward(request_id="c-1", session="s", lengths=[2, 1], model="reference", loss=DPO),
    Forward(request_id="c-1", session="s", lengths=[2, 1], loss=DPO),
    FORWARD,
    PAIR,
    OptimStep(request_id="c-1", session="s", learning_rate=1e-4, max_grad_norm=1.0),
    messages.Save(request_id="c-1", session="s", path="/a", optimizer=False, replace=True),
    messages.Load(request_id="c-1", session="s", path="/a"),
    messages.Publish(request_id="c-1", session="s", name="support-v1.2"),
    messages.CloseSession(request_id="c-1", session="s"),
    messages.LoadAdapter(request_id="c-1", name="a", path="/a"),
    messages.FollowAdapter(request_id="c-1", name="a", path="/a", adapter_version="ab" * 32, source="two"),
    messages.RollbackAdapter(request_id="c-1", name="a", adapter_version="ab"),
    messages.ListAdapters(request_id="c-1"),
    messages.ForgetAdapter(request_id="c-1", name="a"),
    messages.DropAdapter(request_id="c-1", lora_id="i"),
    messages.ChangeSettings(request_id="c-1", changes={"train_share": 0.5, "weights": {"s": 2.0}}),
]
REPLIES = [
    replies.ErrorReply(request_id="c-1", category="user", kind="ConflictError", message="no"),
    replies.SessionReply(request_id="c-1", info=INFO),
    ForwardReply(request_id="c-1", loss=-1.5, num_tokens=3, seconds=0.1),
    ForwardReply(
        request_id="c-1", loss=0.7, num_tokens=3, seconds=0.1, metrics={"rewards/chosen": -1.0}, num_correct=2
    ),
    replies.OptimReply(request_id="c-1", step=1, grad_norm=0.25, finished_at=1.7e9),
    replies.SavedReply(request_id="c-1", path="/a", content_hash="ff", step=2),
    replies.PublishReply(request_id="c-1", name="a", version="v", lora_id="i", publish_ms=1.0),
    replies.AdaptersReply(request_id="c-1", adapters=[replies.AdapterInfo(name="a", current=None, versions=[])]),
    replies.ForgottenReply(request_id="c-1", lora_id=None),
    replies.SettingsReply(request_id="c-1", settings=Settings(tpot_target_ms=40.0, weights={"s": 2.0})),
    replies.DoneReply(request_id="c-1"),
]


def arrays_for(message: Any) -> dict[str, np.ndarray]:
    values = {**ARRAYS, "logprobs": np.array([-1.0, -0.0, -3.4e38], np.float32), "reference": REFERENCE}
    return {name: values[name] for name in codec.arrays_of(message)}


def assert_same_arrays(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert list(found) == list(wanted)
    for name, array in found.items():
        assert array.dtype == wanted[name].dtype
        np.testing.assert_array_equal(array, wanted[name])


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda m: type(m).__name__)
def test_a_request_comes_back_as_it_was(request_: Any) -> None:
    arrays = arrays_for(request_)
    found, found_arrays = codec.decode_request(codec.encode(request_, arrays))
    assert found == request_
    assert_same_arrays(found_arrays, arrays)


@pytest.mark.parametrize("reply", REPLIES, ids=lambda m: type(m).__name__)
def test_a_reply_comes_back_as_it_was(reply: Any) -> None:
    arrays = arrays_for(reply)
    found, found_arrays = codec.decode_reply(codec.encode(reply, arrays))
    assert found == reply
    assert_same_arrays(found_arrays, arrays)


def test_every_message_type_is_in_one_of_the_tables_above() -> None:
    assert {type(m) for m in REQUESTS} == set(messages.AnyRequest.__args__)
    assert {type(m) for m in REPLIES} | {replies.StatusReply} == set(replies.AnyReply.__args__)


def test_a_move_of_a_name_is_no_request_to_the_resident() -> None:
    move = messages.MoveName(request_id="m", name="a", adapter_version="v", lora_id="i", expires_at=1.5)
    frames = codec.encode(move)
    assert codec.decode_move(frames) == (move, {})
    with pytest.raises(ProtocolError, match="move_name"):
        codec.decode_request(frames)
    header = msgspec.msgpack.decode(frames[1]) | {"version": 2}
    with pytest.raises(ProtocolError, match="protocol version 2"):
        codec.decode_move([frames[0], msgspec.msgpack.encode(header), frames[2]])


def test_frames_are_those_of_the_documented_example() -> None:
    document = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
    example = document.split("```hex\n")[1].split("```")[0]
    lines = [line.split("#")[0] for line in example.splitlines()]
    documented: list[bytes] = []
    for line in lines:
        if line.startswith("frame"):
            documented.append(b"")
        else:
            documented[-1] += bytes.fromhex(line)
    arrays = {
        "tokens": np.array([1, 2], np.int32),
        "targets": np.array([2, 3], np.int32),
        "weights": np.array([0, 1], np.float32),
    }
    assert documented == codec.encode(Forward(request_id="c-1", session="s", lengths=[2]), arrays)


def test_non_contiguous_arrays_are_sent_in_c_order() -> None:
    arrays = {**ARRAYS, "tokens": np.arange(6, dtype=np.int32)[::2], "weights": np.zeros(3, ">f4")}
    with pytest.raises(ProtocolError, match="dtype >f4"):
        codec.encode(FORWARD, arrays)
    arrays["weights"] = ARRAYS["weights"]
    _, found = codec.decode_request(codec.encode(FORWARD, arrays))
    np.testing.assert_array_equal(found["tokens"], [0, 2, 4])


def test_decoded_arrays_are_read_only() -> None:
    _, found = codec.decode_request(codec.encode(FORWARD, ARRAYS))
    with pytest.raises(ValueError, match="read-only"):
        found["tokens"][0] = 1


@settings(deadline=None)
@given(st.lists(st.binary(max_size=64), max_size=8))
def test_random_frames_are_a_protocol_error(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        codec.decode_request(frames)
    with pytest.raises(ProtocolError):
        codec.decode_reply(frames)


@settings(max_examples=examples(400), deadline=None)
@given(st.data())
def test_damaged_frames_are_a_protocol_error_or_a_valid_message(data: st.DataObject) -> None:
    message = data.draw(st.sampled_from(REQUESTS))
    frames = codec.encode(message, arrays_for(message))
    index = data.draw(st.integers(0, len(frames) - 1))
    damaged = bytearray(frames[index])
    start = data.draw(st.integers(0, len(damaged)))
    end = data.draw(st.integers(start, len(damaged)))
    damaged[start:end] = data.draw(st.binary(max_size=12))
    frames[index] = bytes(damaged)
    try:
        found, arrays = codec.decode_request(frames)
    except ProtocolError:
        return
    again, arrays_again = codec.decode_request(codec.encode(found, arrays))
    assert again == found
    assert_same_arrays(arrays_again, arrays)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5), min_size=1, max_size=5), st.randoms()
)
def test_any_valid_batch_comes_back_as_it_was(sequences: list[list[int]], random: Any) -> None:
    flat = [token for sequence in sequences for token in sequence]
    arrays = {
        "tokens": np.array(flat, np.int32),
        "targets": np.array(flat[::-1], np.int32),
        "weights": np.array([random.uniform(-1e38, 1e38) for _ in flat], np.float32),
    }
    request = Forward(request_id="x", session="s", lengths=[len(sequence) for sequence in sequences])
    found, found_arrays = codec.decode_request(codec.encode(request, arrays))
    assert found == request
    assert_same_arrays(found_arrays, arrays)


def header(**changes: Any) -> bytes:
    fields = msgspec.to_builtins(FORWARD) | changes
    return msgspec.msgpack.encode({key: value for key, value in fields.items() if value is not ...})


def descriptors(**changes: Any) -> bytes:
    first = {"name": "tokens", "dtype": "int32", "shape": [3]} | changes
    rest = [{"name": name, "dtype": codec.ARRAYS_OF[Forward][name], "shape": [3]} for name in ("targets", "weights")]
    return msgspec.msgpack.encode([first, *rest])


GOOD = codec.encode(FORWARD, ARRAYS)
INFINITE_WEIGHTS = np.array([1, np.inf, 1], np.float32).tobytes()
PREFERENCE: dict[str, Any] = {"name": "preference", "kind": "ipo", "beta": 0.1}
MALFORMED = {
    "no frame": ([], "0 frames"),
    "two frames": (GOOD[:2], "2 frames"),
    "too many frames": ([*GOOD, *[b""] * 20], "26 frames; allowed are 3 to 16"),
    "wrong magic": ([b"KT2", *GOOD[1:]], "frame 0 is b'KT2'"),
    "truncated message": ([GOOD[0], GOOD[1][:-1], *GOOD[2:]], "frame 1 .*truncated"),
    "trailing bytes": ([GOOD[0], GOOD[1] + b"\0", *GOOD[2:]], "frame 1"),
    "not a map": ([GOOD[0], b"\x91\x01", *GOOD[2:]], "frame 1"),
    "empty message": ([GOOD[0], b"", *GOOD[2:]], "frame 1"),
    "deep nesting": ([GOOD[0], b"\x81\xa1x" + b"\x91" * 100_000, *GOOD[2:]], "recursion"),
    "array of 2^31 announced": ([GOOD[0], header().replace(b"\x92\x02\x01", b"\xdd\x7f\xff\xff\xff"), *GOOD[2:]], "1"),
    "text that is not UTF-8": ([GOOD[0], header(session="zz").replace(b"zz", b"\xff\xff"), *GOOD[2:]], "utf-8"),
    "unknown type": ([GOOD[0], header(type="shutdown"), *GOOD[2:]], "shutdown"),
    "a reply as a request": ([GOOD[0], header(type="done"), *GOOD[2:]], "done"),
    "no type": ([GOOD[0], header(type=...), *GOOD[2:]], "type"),
    "unknown field": ([GOOD[0], header(adaptor_off=True), *GOOD[2:]], "adaptor_off"),
    "missing field": ([GOOD[0], header(session=...), *GOOD[2:]], "session"),
    "wrong version": ([GOOD[0], header(version=1), *GOOD[2:]], "protocol version 1; this side speaks 7"),
    "no version": ([GOOD[0], header(version=...), *GOOD[2:]], "protocol version None"),
    "empty request id": ([GOOD[0], header(request_id=""), *GOOD[2:]], "request_id"),
    "long request id": ([GOOD[0], header(request_id="x" * 129), *GOOD[2:]], "request_id"),
    "path as a name": ([GOOD[0], header(session="../x"), *GOOD[2:]], "session"),
    "name with a line end": ([GOOD[0], header(session="x\n"), *GOOD[2:]], "session"),
    "text as lengths": ([GOOD[0], header(lengths="3"), *GOOD[2:]], "lengths"),
    "no sequence": ([GOOD[0], header(lengths=[]), *GOOD[2:]], "lengths"),
    "empty sequence": ([GOOD[0], header(lengths=[3, 0]), *GOOD[2:]], "lengths"),
    "lengths of another sum": ([GOOD[0], header(lengths=[3, 2**63]), *GOOD[2:]], "3 elements, but the lengths add up"),
    "unknown loss": ([GOOD[0], header(loss={"name": "__import__"}), *GOOD[2:]], "loss"),
    "unknown model": ([GOOD[0], header(model="reference"), *GOOD[2:]], "model"),
    "unknown kind of preference": ([GOOD[0], header(loss=PREFERENCE | {"kind": "kto_pair"}), *GOOD[2:]], "loss.kind"),
    "a setting of another kind": ([GOOD[0], header(loss=PREFERENCE | {"gamma": 0.5}), *GOOD[2:]], "only 'simpo' knows"),
    "no reference": ([GOOD[0], header(loss=PREFERENCE), *GOOD[2:]], "carries .*'reference'"),
    "unknown dtype": ([*GOOD[:2], descriptors(dtype="object"), *GOOD[3:]], "object"),
    "other dtype": ([*GOOD[:2], descriptors(dtype="float32"), *GOOD[3:]], "tokens.*must be int32"),
    "negative shape": ([*GOOD[:2], descriptors(shape=[-3]), *GOOD[3:]], "shape"),
    "shape too large": ([*GOOD[:2], descriptors(shape=[2**62, 2**62]), *GOOD[3:]], "12 bytes; int32"),
    "shape beyond numpy": ([*GOOD[:2], descriptors(shape=[2**63, 0]), b"", *GOOD[4:]], "impossible shape"),
    "two dimensions": ([*GOOD[:2], descriptors(shape=[3, 1]), *GOOD[3:]], "one-dimensional"),
    "no dimension": ([*GOOD[:2], descriptors(shape=[]), *GOOD[3:]], "shape"),
    "frame too short": ([*GOOD[:3], GOOD[3][:-1], *GOOD[4:]], "11 bytes; int32 .3. takes 12"),
    "same array twice": ([*GOOD[:2], descriptors(name="targets"), *GOOD[3:]], "second array"),
    "unknown array": ([*GOOD[:2], descriptors(name="labels"), *GOOD[3:]], "labels.*carries"),
    "frame missing": (GOOD[:-1], "describes 3 arrays, but 2 frames"),
    "weight is infinite": ([*GOOD[:5], INFINITE_WEIGHTS], r"weights\[1\] is inf"),
    "descriptors not a list": ([*GOOD[:2], b"\x80", *GOOD[3:]], "frame 2"),
}


@pytest.mark.parametrize("frames, message", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_frames_are_refused_with_the_reason(frames: list[bytes], message: str) -> None:
    with pytest.raises(ProtocolError, match=re.compile(message, re.IGNORECASE)):
        codec.decode_request(frames)


def test_only_a_preference_loss_of_the_policy_with_a_reference_takes_its_log_probabilities() -> None:
    takes = {
        (kind, model): "reference"
        in codec.arrays_of(
            Forward(request_id="a", session="s", lengths=[1, 1], model=model, loss=PreferenceLoss(kind=kind, beta=1.0))
        )
        for kind in ("sigmoid", "hinge", "ipo", "orpo", "simpo")
        for model in ("policy", "base", "reference")
    }
    assert {key for key, value in takes.items() if value} == {(k, "policy") for k in ("sigmoid", "hinge", "ipo")}


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        (np.zeros(3, np.float32), "3 elements, but there are 2 sequences"),
        (np.array([0, np.nan], np.float32), r"reference\[1\] is nan"),
        (np.zeros((2, 1), np.float32), "one-dimensional"),
        (np.zeros(2, np.int32), "must be float32"),
    ],
)
def test_a_reference_must_be_one_finite_number_per_sequence(reference: np.ndarray, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        codec.encode(PAIR, {**ARRAYS, "reference": reference})


def test_a_loss_without_a_reference_refuses_one() -> None:
    with pytest.raises(ProtocolError, match=r"reference.*this message carries"):
        codec.encode(FORWARD, {**ARRAYS, "reference": REFERENCE})


def test_a_preference_loss_refuses_what_its_kind_does_not_know() -> None:
    with pytest.raises(InvalidValueError, match=r"'hinge': label_smoothing is 0\.1; only 'sigmoid'"):
        PreferenceLoss(kind="hinge", beta=0.1, label_smoothing=0.1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_refused_both_ways(value: float) -> None:
    request = OptimStep(request_id="c-1", session="s", learning_rate=value)
    with pytest.raises(ProtocolError, match=r"OptimStep\.learning_rate is "):
        codec.encode(request)
    with pytest.raises(ProtocolError, match="learning_rate"):
        codec.decode_request([codec.MAGIC, msgspec.msgpack.encode(request), b"\x90"])


@pytest.mark.parametrize("path", [np.float32(1.5), "\ud800", 2**64, object()])
def test_a_field_that_msgpack_does_not_know_is_a_protocol_error(path: Any) -> None:
    with pytest.raises(ProtocolError, match="Load: "):
        codec.encode(messages.Load(request_id="c-1", session="s", path=path))


def test_every_limit_is_enforced() -> None:
    limits = Limits(max_message_bytes=len(b"".join(GOOD)), max_header_bytes=len(GOOD[1]), max_frames=len(GOOD))
    limits = Limits(limits.max_message_bytes, max(map(len, GOOD)), limits.max_frames)
    codec.decode_request(GOOD, limits)
    for smaller, reason in (
        (Limits(limits.max_message_bytes - 1, limits.max_header_bytes, limits.max_frames), "a message of .* bytes"),
        (Limits(limits.max_message_bytes, limits.max_header_bytes - 1, limits.max_frames), "frame . has"),
        (Limits(limits.max_message_bytes, limits.max_header_bytes, limits.max_frames - 1), "6 frames"),
    ):
        with pytest.raises(ProtocolError, match=reason):
            codec.decode_request(GOOD, smaller)
        with pytest.raises(ProtocolError, match=reason):
            codec.encode(FORWARD, ARRAYS, smaller)


class Canary:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("position", range(6))
def test_a_pickle_is_not_loaded(tmp_path: Path, position: int) -> None:
    canary = tmp_path / "loaded"
    payload = pickle.dumps(Canary(canary))
    frames = [*GOOD[:position], payload, *GOOD[position + 1 :]]
    with pytest.raises(FrameError):
        codec.decode_request(frames)
    assert not canary.exists()
    pickle.loads(payload).close()  # the canary itself works
    assert canary.exists()
