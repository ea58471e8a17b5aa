"""`--routing-replay` is refused, with the numbers, where it can't do what it is asked for, and is part of the plan."""

from __future__ import annotations

from typing import Any

import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.families import family_for
from kt_runtime.resident.routes.store import RouteStore
from kt_runtime.serve.memory.plan import plan_memory
from kt_runtime.serve.memory.routes import check_routing_replay
from kt_runtime.serve.memory.server import serving_shape
from kt_runtime.serve.models.presets import load_preset
from kt_runtime.serve.options.named import ServeOptions, own_option_names

CONFIG = load_preset("tiny-deepseek-v3").config
FAMILY = family_for(CONFIG)
TOKEN = RouteStore.bytes_of_token(
    len(FAMILY.moe_layers(CONFIG)), FAMILY.num_experts_per_tok(CONFIG), FAMILY.expert_shape(CONFIG)[0]
)


def check(*, with_gpu: bool = False, **options: Any) -> None:
    check_routing_replay(ServeOptions(model="m", **options), CONFIG, with_gpu=with_gpu)


def test_sizes_that_hold_a_sequence_are_accepted() -> None:
    check()
    check(with_gpu=True)
    check(routing_replay_bytes=16384 * TOKEN)
    check(routing_replay_bytes=512 * TOKEN, context_tokens=512)
    check(routing_replay_bytes=512 * TOKEN, max_total_tokens=512)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"routing_replay_bytes": 1 << 28, "with_gpu": True},
            "--routing-replay 256 MiB: routes are kept by a server on a CPU only; .*--device cpu",
        ),
        (
            {"routing_replay_bytes": 512 * TOKEN - 1, "context_tokens": 512},
            f"a token takes {TOKEN} bytes, and a sequence may have 512 tokens; give at least",
        ),
        ({"routing_replay_bytes": -1}, "--routing-replay -1: must be at least 0"),
    ],
)
def test_what_can_not_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        check(**options)


def test_routes_are_part_of_the_plan() -> None:
    needs = [
        {need.what: need.size_bytes for need in plan_memory(CONFIG, serving_shape(options, with_gpu=False)).needs}
        for options in (ServeOptions(model="m"), ServeOptions(model="m", routing_replay_bytes=1 << 24))
    ]
    assert needs[1] == needs[0] | {"routes for routing replay": 1 << 24}
    assert "--routing-replay" in own_option_names()
