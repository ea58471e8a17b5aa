"""Our messages and the SDK's: each reads what the other writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kt_runtime.serve.tinker.protocol import schema
from kt_runtime.serve.tinker.protocol.batches import call_from_protobuf
from kt_runtime.serve.tinker.protocol.results import ForwardResult, SampledSequence, SampleResult
from kt_runtime.wire.messages import CrossEntropy, PolicyLoss

tinker = pytest.importorskip("tinker", reason="pip install kt-runtime[test]")


def test_every_field_has_the_number_and_type_of_the_sdks_message() -> None:
    from tinker.proto import tinker_public_pb2 as theirs

    compared = 0
    for name in ("ForwardBackwardRequest", "ForwardBackwardOutput", "SampleResponse"):
        ours = getattr(schema, name).DESCRIPTOR
        compared += compare(ours, theirs.DESCRIPTOR.message_types_by_name[name], set())
    assert compared > 40


def compare(ours, theirs, seen) -> int:  # type: ignore[no-untyped-def]
    if ours.full_name in seen:
        return 0
    seen.add(ours.full_name)
    count = 0
    for field in ours.fields:
        same = theirs.fields_by_number[field.number]
        assert field.name == same.name, ours.full_name
        assert field.is_repeated == same.is_repeated, field.full_name
        wire_type = {14: 5}  # an enum is read as an int32
        assert field.type == wire_type.get(same.type, same.type), field.full_name
        count += 1
        if field.message_type is not None and field.message_type.name != "Opaque":
            count += compare(field.message_type, same.message_type, seen)
    return count


def datum(tokens: list[int], **inputs: list[float]) -> Any:
    from tinker import types

    dtypes: dict[str, Any] = {"target_tokens": np.int64}
    arrays: Any = {name: np.array(values, dtypes.get(name, np.float32)) for name, values in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=arrays)


def request_bytes(data: list[Any], loss_fn: Any, config: dict[str, float] | None = None) -> bytes:
    from tinker import types
    from tinker.proto.request_conv import forward_backward_request_to_proto

    given = types.ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=config)
    request = types.ForwardBackwardRequest(forward_backward_input=given, model_id="s1:train:0", seq_id=3)
    return forward_backward_request_to_proto(request).SerializeToString()


def test_a_cross_entropy_of_the_sdk_is_read() -> None:
    data = [
        datum([1, 2, 3], target_tokens=[2, 3, 4], weights=[0, 1, -0.5]),
        datum([9], target_tokens=[8], weights=[2]),
    ]
    call = call_from_protobuf(request_bytes(data, "cross_entropy"))
    assert (call.model_id, call.seq_id, call.forward_only) == ("s1:train:0", 3, False)
    read = call.read(64)
    assert read.batch.lengths == [3, 1] and read.batch.tokens.tolist() == [1, 2, 3, 9]
    assert read.batch.targets.tolist() == [2, 3, 4, 8] and read.batch.weights.tolist() == [0, 1, -0.5, 2]
    assert isinstance(read.loss, CrossEntropy) and read.samples is None


def test_a_policy_loss_of_the_sdk_is_read_and_prompt_tokens_do_not_count() -> None:
    data = [datum([1, 2, 3], target_tokens=[2, 3, 4], logprobs=[0, -0.5, -1], advantages=[0, 0, 2])]
    config = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.5}
    read = call_from_protobuf(request_bytes(data, "ppo", config)).read(64)
    assert read.loss == PolicyLoss(kind="ppo", clip_low=0.7, clip_high=1.5)
    assert read.samples is not None and read.samples.logprobs.tolist() == [0, -0.5, -1]
    assert read.batch.weights.tolist() == [0, 1, 1]


def test_the_sdk_reads_a_forward_result() -> None:
    from tinker.proto.response_conv import deserialize_forward_backward_output

    logprobs = [np.array([-1, -2, -3], np.float32), np.array([-4], np.float32)]
    read = deserialize_forward_backward_output(ForwardResult(logprobs, {"loss:sum": 2.5}).protobuf())
    assert read.metrics == {"loss:sum": 2.5}
    assert [output["logprobs"].to_numpy().tolist() for output in read.loss_fn_outputs] == [[-1, -2, -3], [-4]]


def test_the_sdk_reads_a_sample() -> None:
    from tinker.proto.response_conv import deserialize_sample_response

    top = [(5, -0.5), (6, -1.0)]
    result = SampleResult(
        [SampledSequence([5, 6], [-0.5, -0.25], True, [top, top[:1]]), SampledSequence([7], [-1.0], False)],
        prompt_logprobs=[None, -0.75],
        prompt_top=[None, top],
        cached_tokens=1,
    )
    read = deserialize_sample_response(result.protobuf())
    assert [(one.tokens, one.logprobs, one.stop_reason) for one in read.sequences] == [
        ([5, 6], [-0.5, -0.25], "stop"),
        ([7], [-1.0], "length"),
    ]
    assert read.sequences[0].topk_logprobs == [top, top[:1]]
    assert read.prompt_logprobs == [None, -0.75] and read.topk_prompt_logprobs == [None, top]
    assert read.prompt_cache_hit_tokens == 1
