"""What a training call may hold: each mistake is an error that names the datum, the value and what is allowed."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest

from kt_runtime.errors import InvalidValueError, KtError, UnknownNameError
from kt_runtime.serve.tinker.protocol.batches import call_from_json, call_from_protobuf, loss_of
from kt_runtime.serve.tinker.protocol.schema import FLOAT32, INT64, ForwardBackwardRequest
from kt_runtime.wire.messages import PolicyLoss


def message(loss: str = "cross_entropy", tokens: int = 3, **inputs: Any) -> Any:
    """A request with one datum. `inputs`: values, or a function that fills the tensor."""
    request = ForwardBackwardRequest(model_id="s:train:0", seq_id=1, loss_fn=loss)
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(1, tokens + 1, dtype="<i4").tobytes()
    for name, values in {"target_tokens": [2, 3, 4], **inputs}.items():
        tensor = datum.loss_fn_inputs[name]
        if callable(values):
            values(tensor)
        else:
            is_target = name == "target_tokens"
            tensor.dense = np.array(values, "<i8" if is_target else "<f4").tobytes()
            tensor.dtype = INT64 if is_target else FLOAT32
    return request


def read(request: Any, context_tokens: int = 64) -> Any:
    return call_from_protobuf(request.SerializeToString()).read(context_tokens)


def test_without_weights_every_target_counts() -> None:
    assert read(message()).batch.weights.tolist() == [1, 1, 1]


def test_a_sparse_column_is_spread_over_its_rows() -> None:
    def fill(tensor: Any) -> None:
        tensor.dtype, tensor.shape[:] = FLOAT32, [3, 1]
        tensor.sparse_csr.values = np.array([0.5], "<f4").tobytes()
        tensor.sparse_csr.crow_indices = np.array([0, 0, 1, 1], "<i8").tobytes()
        tensor.sparse_csr.col_indices = np.array([0], "<i8").tobytes()

    assert read(message(weights=fill)).batch.weights.tolist() == [0, 0.5, 0]


def test_both_forms_of_the_settings_are_read() -> None:
    request = message("cispo", logprobs=[-1.0, -1, -1], advantages=[1.0, 1, 1])
    request.loss_fn_config["clip_low_threshold"] = 0.1
    request.loss_fn_config_v2["clip_high_threshold"].number = 3.0
    assert read(request).loss == PolicyLoss(kind="cispo", clip_low=0.1, clip_high=3.0)


def test_routing_replay_stands_beside_a_loss_s_own_settings() -> None:
    request = message("cispo", logprobs=[-1.0, -1, -1], advantages=[1.0, 1, 1])
    assert read(request).routing_replay == "off"
    request.loss_fn_config["clip_low_threshold"] = 0.1
    for number, wanted in ((1.0, "rollout"), (0.0, "off")):
        request.loss_fn_config["routing_replay"] = number
        assert read(request).routing_replay == wanted
    for text in ("off", "compare", "rollout"):
        request.loss_fn_config_v2["routing_replay"].text = text
        assert read(request).routing_replay == text
    assert read(request).loss == PolicyLoss(kind="cispo", clip_low=0.1)
    body = {"data": [], "loss_fn": "cross_entropy", "loss_fn_config": {"routing_replay": 0.5}}
    call = call_from_json(orjson.dumps({"model_id": "s:train:0", "forward_backward_input": body}), forward_only=False)
    with pytest.raises(
        UnknownNameError, match=r"loss_fn_config: routing_replay: unknown value '0\.5'.*compare, off, ro"
    ):
        call.read(64)
    request.loss_fn_config_v2["routing_replay"].text = "rolout"
    with pytest.raises(UnknownNameError, match="unknown value 'rolout'; did you mean 'rollout'"):
        read(request)


def bad(fill: str) -> Any:
    def tensor(tensor: Any) -> None:
        if fill == "dtype":
            tensor.dense, tensor.dtype = b"\0" * 12, 4
        elif fill == "bytes":
            tensor.dense, tensor.dtype = b"\0" * 13, FLOAT32
        elif fill == "two columns":
            tensor.dense, tensor.dtype, tensor.shape[:] = b"\0" * 24, FLOAT32, [3, 2]
        elif fill == "shape":
            tensor.dense, tensor.dtype, tensor.shape[:] = b"\0" * 12, FLOAT32, [4]
        elif fill == "huge sparse":
            tensor.dtype, tensor.shape[:] = FLOAT32, [1 << 60, 1]
            tensor.sparse_csr.values = b""

    return tensor


POLICY: dict[str, Any] = {"logprobs": [-1.0, -1, -1], "advantages": [1.0, 1, 1]}
MISTAKES: list[tuple[Any, str]] = [
    (message("stable_reinforce"), "unknown loss 'stable_reinforce'"),
    (message(target_tokens=[2, 3]), r"data\[0\]: 2 target_tokens for 3 tokens"),
    (message(target_tokens=[2, 3, -4]), r"targets\[2\] is -4"),
    (message(weights=[1.0, np.nan, 1]), r"weights\[1\] is nan"),
    (message(tokens=65), r"data\[0\]: 65 tokens; allowed are 1 to 64"),
    (message(tokens=0), r"data\[0\]: 0 tokens"),
    (message("ppo", logprobs=[0.0, 0, 0]), "no advantages; ppo needs"),
    (message("ppo", **{**POLICY, "advantages": [1.0, np.nan, 1]}), r"advantages\[1\] is nan"),
    (message("ppo", **POLICY, temperature=[1.0, 1, 1]), "ppo has no input 'temperature'"),
    (message("dro", **POLICY), "needs beta"),
    (message(weights=bad("dtype")), "weights: dtype 4"),
    (message(weights=bad("bytes")), "13 bytes are no whole number of 4-byte values"),
    (message(weights=bad("two columns")), r"shape \[3, 2\]; allowed is one value a token"),
    (message(weights=bad("shape")), r"3 values for shape \[4\]"),
    (message(weights=bad("huge sparse")), "sparse indices do not describe"),
    (ForwardBackwardRequest(loss_fn="cross_entropy"), "0 data"),
]


@pytest.mark.parametrize(("request_", "said"), MISTAKES, ids=[said for _, said in MISTAKES])
def test_a_mistake_is_named(request_: Any, said: str) -> None:
    with pytest.raises(KtError, match=said):
        read(request_)


def test_a_picture_is_refused() -> None:
    request = message()
    request.data[0].model_input.add().image.SetInParent()
    with pytest.raises(InvalidValueError, match="picture or sound"):
        read(request)


def test_a_setting_of_another_loss_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="cross_entropy has no setting 'beta'; it has: none"):
        loss_of("cross_entropy", {"beta": 1.0})
    with pytest.raises(InvalidValueError, match="must be a number"):
        loss_of("dro", {"beta": "big"})
    with pytest.raises(UnknownNameError):
        loss_of("ppo2", {})


def test_other_bytes_are_no_request() -> None:
    with pytest.raises(InvalidValueError, match="no protobuf"):
        call_from_protobuf(b"\xff\xff\xff\xff")


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"[" * 100_000, b'{"model_id": 3}', b'{"model_id": "\xff"}'])
def test_other_json_is_no_request(body: bytes) -> None:
    with pytest.raises(InvalidValueError, match="the body: "):
        call_from_json(body, forward_only=False)


def test_json_of_an_older_sdk_is_read() -> None:
    """Recorded from SDK 0.7.0."""
    body = {
        "forward_input": {
            "data": [
                {
                    "loss_fn_inputs": {
                        "target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]},
                        "weights": {"data": [0.0, 1.5], "dtype": "float32", "shape": [2]},
                    },
                    "model_input": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
                }
            ],
            "loss_fn": "cross_entropy",
        },
        "model_id": "s1:train:0",
        "seq_id": 7,
    }
    call = call_from_json(orjson.dumps(body), forward_only=True)
    assert (call.seq_id, call.forward_only) == (7, True)
    batch = call.read(64).batch
    assert batch.tokens.tolist() == [1, 2] and batch.weights.tolist() == [0, 1.5]
