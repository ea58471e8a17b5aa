"""The protobuf messages of the Tinker API, built from the table below; no generated code, and none of Tinker's SDK.

proto3. `bytes` holds little-endian arrays; offsets of a `BatchedTensor` count bytes. A field of the table is
"NUMBER NAME TYPE", with `repeated`, or `map` for a map from strings. Fields that a newer client adds are ignored, as
protobuf does. tests/unit/serve/tinker/test_schema.py compares the messages with the SDK's own.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "kt_runtime.tinker"

FLOAT32, INT64, INT32 = 1, 2, 3
"""Values of `dtype`. 0 is unspecified, 4 is bfloat16, which clients do not send."""
STOPPED, REACHED_LENGTH = 0, 1
"""Values of `stop_reason`."""

MESSAGES: dict[str, tuple[str, ...]] = {
    "EncodedText": ("1 tokens bytes",),
    "Opaque": (),  # pictures and sounds: only their presence matters
    "Chunk": ("1 encoded_text EncodedText", "2 image Opaque", "3 dmel Opaque"),
    "SparseCsr": ("1 values bytes", "2 crow_indices bytes", "3 col_indices bytes"),
    "Tensor": ("1 dense bytes", "2 sparse_csr SparseCsr", "3 dtype int32", "4 shape int64 repeated"),
    "Datum": (
        "1 model_input Chunk repeated",
        "2 loss_fn_inputs Tensor map",
        "3 model_input_spans Opaque repeated",
        "4 loss_fn_input_spans Opaque repeated",
    ),
    "LossConfigValue": ("1 number double oneof", "2 text string oneof"),
    "ForwardBackwardRequest": (
        "1 model_id string",
        "2 seq_id int32",
        "3 data Datum repeated",
        "4 loss_fn string",
        "5 loss_fn_config double map",
        "6 forward_only bool",
        "7 loss_fn_config_v2 LossConfigValue map",
    ),
    "BatchedTensor": ("1 data bytes", "2 offsets bytes", "3 dtype int32", "4 trailing_shape int64 repeated"),
    "ArrayRecord": ("1 type_tag string", "2 fields BatchedTensor map", "3 num_datums int64"),
    "ForwardBackwardOutput": (
        "1 loss_fn_output_type string",
        "2 loss_fn_outputs ArrayRecord repeated",
        "3 metrics double map",
    ),
    "TopkLogprobs": ("1 token_ids bytes", "2 logprobs bytes", "3 k uint32", "4 length uint32"),
    "SampledSequence": (
        "1 stop_reason int32",
        "2 tokens bytes",
        "3 logprobs bytes",
        "4 topk_sampled_logprobs TopkLogprobs",
    ),
    "SampleResponse": (
        "1 sequences SampledSequence repeated",
        "2 prompt_logprobs bytes",
        "3 topk_prompt_logprobs TopkLogprobs",
        "4 prompt_cache_hit_tokens int32",
    ),
}

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "double": _Field.TYPE_DOUBLE,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "string": _Field.TYPE_STRING,
    "uint32": _Field.TYPE_UINT32,
}


def _add_field(message: Any, number: int, name: str, kind: str, label: str = "") -> None:
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if label in ("repeated", "map"):
        field.label = _Field.LABEL_REPEATED
    if label == "map":
        entry = message.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, 1, "key", "string")
        _add_field(entry, 2, "value", kind)
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{message.name}.{entry.name}"
    elif kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    if label == "oneof":
        if not message.oneof_decl:
            message.oneof_decl.add(name="value")
        field.oneof_index = 0


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="kt_runtime/tinker.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields:
            number, *rest = field.split()
            _add_field(message, int(number), *rest)
    pool = descriptor_pool.DescriptorPool()  # of our own: the SDK in the same process may register its messages
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES}


_CLASSES = _classes()
ForwardBackwardRequest: Any = _CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput: Any = _CLASSES["ForwardBackwardOutput"]
SampleResponse: Any = _CLASSES["SampleResponse"]
