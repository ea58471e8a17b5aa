"""Messages of the training protocol from an index: each kind, valid, at its edges, and broken in its frames."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
import numpy as np
from system.fuzz.raw_json import Pairs, Raw
from system.fuzz.values import Values

from kt_runtime.wire.codec import MAGIC
from kt_runtime.wire.messages import PROTOCOL_VERSION, AnyRequest

SESSIONS = ["fuzz-1", "fuzz-2", "fuzz-3"]
NAMES = ["fuzz-a", "fuzz-b", "fuzz-c", "fuzz-d"]
KINDS = {kind.__struct_config__.tag: kind for kind in get_args(AnyRequest)}
LORA = {"rank": 4, "alpha": 8.0, "targets": ["all"], "seed": 3}
CROSS_ENTROPY = {"name": "cross_entropy"}
PREFERENCE = {"name": "preference", "kind": "orpo", "beta": 0.1}
POLICY = {"name": "policy", "kind": "ppo"}

FIELDS: dict[str, list[Any]] = {
    "session": [*SESSIONS, "nobody", "", "a" * 200, "../x", 5],
    "name": [*NAMES, "nobody", "", "a/b", "a" * 128, None],
    "lora": [
        LORA, {**LORA, "rank": 8, "dropout": 0.3}, {**LORA, "rank": 1, "targets": ["q_proj"]}, {**LORA, "rank": 10**9},
        {**LORA, "alpha": 1e308}, {**LORA, "alpha": 1e-300}, {**LORA, "targets": []}, {**LORA, "targets": ["x"]},
            {**LORA, "seed": -1},
        {**LORA, "seed": 2**63}, {**LORA, "targets": ["all"] * 5000}, {**LORA, "targets": ["experts", "experts"]},
            {"rank": 4}, {},
    ],
    "start_from": [None, "PEFT", "BROKEN", "SAVED", "/nowhere", "/dev/zero", "\0", ""],
    "reference": [None, "PEFT", "BROKEN", "/nowhere", 5],
    "loss": [CROSS_ENTROPY, PREFERENCE, {**PREFERENCE, "kind": "sigmoid"}, {**PREFERENCE, "beta": 1e300},
        {**PREFERENCE, "kind": "x"}, POLICY, {**POLICY, "kind": "gspo"}, {**POLICY, "kind": "dro", "beta": 1e-9},
        {**POLICY, "clip_high": 0.5}, {**POLICY, "kind": "dro"}, {}],
    "model": ["policy", "base", "reference", "x"],
    "activations": ["recompute", "retain", "x"],
    "learning_rate": [0.0, 1e-3, 0.1, 1e19, 3e38, 1e300, -1.0, float("nan"), float("inf")],
    "beta1": [0.9, 0.0, 1.0, 0.999999999], "beta2": [0.999, 0.0, 1.0], "epsilon": [1e-8, 1e-320, 0.0, 1e300],
    "weight_decay": [0.0, 0.1, 1e300, -1.0], "max_grad_norm": [0.0, 1.0, 1e-320, 1e300], "lora_plus_ratio": [1.0,
        1e300, 0.0],
    "path": ["PEFT", "SAVED", "BROKEN", "NEW", "/nowhere", "", "\0", "x" * 5000],
    "publishes": [None, *NAMES, "a/b"], "take_over": [True, True, False],
    "optimizer": [True, False, 5], "replace": [True, False],
    "verify_weights": [False, False, True], "wait_s": [0.0, 0.1, None, -1.0, 1e300],
    "adapter_version": [None, "", "0", "f" * 64, "x", "0000"],
    "lora_id": ["x", "", "0" * 32, "\0"],
}  # fmt: skip
# Nothing here may be lost where a server replaces what it must not.
SAVE_PATHS = ["SAVED", "NEW", "NEW", "PRECIOUS", "/proc/x", "", "\0", "x" * 5000]
# Which values are of good form, so that most messages get further than the decoder.
GOOD = {"session": SESSIONS, "name": NAMES, "lora": FIELDS["lora"][:3], "loss": FIELDS["loss"][:2], "model": ["policy"]}
# How often: what changes state, then what computes.
WEIGHTS = {
    "create_session": 4,
    "forward_backward": 4,
    "forward": 3,
    "optim_step": 4,
    "publish": 3,
    "save": 3,
    "load": 3,
}
MOST_TOKENS = 96


@dataclass(frozen=True)
class WirePlaces:
    """`saved`, `new`, `precious`: directories for `Save`; what is in `precious` was not written by it and must stay."""

    peft: str
    broken: tuple[str, ...]
    saved: str
    new: str
    precious: str


@dataclass(frozen=True)
class WireCase:
    name: str
    kind: str
    request_id: str
    frames: tuple[bytes, ...]
    fault: str | None = None


class WireCases:
    def __init__(self, places: WirePlaces, seed: int) -> None:
        self.places, self.seed = places, seed

    def case(self, index: int) -> WireCase:
        randomness = random.Random(f"wire/{self.seed}/{index}")
        values = Values(randomness, {})
        kind = randomness.choices(list(KINDS), [WEIGHTS.get(tag, 1) for tag in KINDS])[0]
        request_id = f"fuzz-{self.seed}-{index}"
        fields = {"type": kind, "version": PROTOCOL_VERSION, "request_id": request_id, **self._fields(values, kind)}
        lengths = fields.get("lengths", [])
        descriptors, buffers = _arrays(values, kind, lengths, fields)
        case = WireCase(f"wire-{self.seed}-{index}", kind, request_id, _frames(fields, descriptors, buffers))
        return _broken(values, case, fields) if values.chance(0.2) else case

    def _fields(self, values: Values, kind: str) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for field in msgspec.structs.fields(KINDS[kind]):
            if field.name in ("version", "request_id") or (not field.required and values.chance(0.6)):
                continue
            if field.name == "lengths":
                made["lengths"] = [values.one((1, 2, 7, 24)) for _ in range(values.one((1, 2, 2, 3)))]
            else:
                known = GOOD if field.name in GOOD and values.chance(0.85) else FIELDS
                choices = SAVE_PATHS if kind == "save" and field.name == "path" else known.get(field.name)
                found = values.one(choices) if choices else _plain(values.of(_schema(field.type)))
                made[field.name] = self._placed(values, found)
        if values.chance(0.15) and made:
            made[values.one(sorted(made))] = _plain(values.anything())
        if values.chance(0.03):
            made[values.one(("x", "type", "tenant"))] = _plain(values.anything())
        return made

    def _placed(self, values: Values, value: Any) -> Any:
        if value == "NEW":
            return f"{self.places.new}/{values.random.randrange(4)}"
        if value == "BROKEN":
            return values.one(self.places.broken)
        known = {"PEFT": self.places.peft, "SAVED": self.places.saved, "PRECIOUS": self.places.precious}
        return known.get(value, value) if isinstance(value, str) else value


def _schema(kind: Any) -> dict[str, Any]:
    """Of a field that `FIELDS` doesn't know yet."""
    return dict(msgspec.json.schema(kind))


def _plain(value: Any) -> Any:
    """What msgpack can carry of it: integers of 64 bits, text that is text."""
    if isinstance(value, Raw):
        return value.content
    if isinstance(value, bool) or value is None or isinstance(value, float):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else float(min(value, 10**300))
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    items = value.items if isinstance(value, Pairs) else value.items()
    return {_plain(key): _plain(item) for key, item in items}


def _arrays(values: Values, kind: str, lengths: Any, fields: dict[str, Any]) -> tuple[list[Any], list[bytes]]:
    if kind not in ("forward", "forward_backward"):
        return [], []
    fits = isinstance(lengths, list) and all(isinstance(length, int) and 0 < length < MOST_TOKENS for length in lengths)
    size = sum(lengths) if fits else 5
    highest = values.one((700, 700, 700, 700, 2**31 - 1))
    tokens = [values.random.randrange(3, highest) for _ in range(size)]
    wanted: dict[str, Any] = {"tokens": np.array(tokens, "<i4"), "targets": np.array([*tokens[1:], 5], "<i4")}
    weight = values.one((1.0, 1.0, 1.0, 0.0, -1.0, 1e30, 3e38, float("nan")))
    wanted["weights"] = np.full(size, weight, "<f4")
    loss = fields.get("loss")
    if fits and isinstance(loss, dict) and loss.get("kind") in ("sigmoid", "hinge", "ipo"):
        wanted["reference"] = np.full(len(lengths), values.one((-5.0, 0.0, 3e38)), "<f4")
    if isinstance(loss, dict) and loss.get("name") == "policy":
        wanted["sampled"] = np.full(size, values.one((-5.0, -1.0, 0.0, -1e4, 3e38)), "<f4")
        wanted["advantages"] = np.full(size, values.one((1.0, -1.0, 0.0, 3e38)), "<f4")
    names = {"<i4": "int32", "<f4": "float32"}
    descriptors = [
        {"name": name, "dtype": names[array.dtype.str], "shape": [len(array)]} for name, array in wanted.items()
    ]
    return descriptors, [array.tobytes() for array in wanted.values()]


def _frames(fields: Any, descriptors: Any, buffers: list[bytes]) -> tuple[bytes, ...]:
    return (MAGIC, msgspec.msgpack.encode(fields), msgspec.msgpack.encode(descriptors), *buffers)


def _broken(values: Values, case: WireCase, fields: dict[str, Any]) -> WireCase:
    """One thing wrong with the frames."""
    frames = list(case.frames)
    fault = values.one(("bytes", "cut", "drop", "twice", "swap", "magic", "version", "noise", "deep", "empty"))
    place = values.random.randrange(len(frames))
    if fault == "bytes":
        frame = bytearray(frames[place] or b"x")
        frame[values.random.randrange(len(frame))] ^= 1 << values.random.randrange(8)
        frames[place] = bytes(frame)
    elif fault == "cut":
        frames[place] = frames[place][: values.random.randrange(len(frames[place]) + 1)]
    elif fault == "drop":
        del frames[place]
    elif fault == "twice":
        frames.insert(place, frames[place])
    elif fault == "swap":
        values.random.shuffle(frames)
    elif fault == "magic":
        frames[0] = values.one((b"", b"KT0", b"KT1\0", b"\0" * 50))
    elif fault == "version":
        frames[1] = msgspec.msgpack.encode({**fields, "version": _plain(values.anything())})
    elif fault == "noise":
        frames[1:] = [values.random.randbytes(values.one((1, 40, 3000))) for _ in range(values.one((1, 2, 14, 30)))]
    elif fault == "deep":
        frames[1] = b"\x91" * values.one((100, 5000)) + b"\x01"
    else:
        frames = [b""] * values.one((1, 3, 5))
    return dataclasses.replace(case, frames=tuple(frames), fault=fault)
