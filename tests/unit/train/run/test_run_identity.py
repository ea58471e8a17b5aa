"""Which runs are the same one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kt_runtime.errors import ConflictError
from kt_runtime.train.examples import Pair
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.run.checkpoints import Checkpoint, check_same_run
from kt_runtime.train.run.inputs import Inputs
from kt_runtime.train.run.run_identity import identity


def test_a_checkpoint_from_before_a_key_was_written_at_its_default(
    make_recipe: Callable[..., Recipe], pairs: list[Pair]
) -> None:
    def identified(**keys: Any) -> dict[str, Any]:
        return identity(make_recipe(stage="dpo", **keys), Inputs(pairs, {}), "base")

    older = {key: value for key, value in identified().items() if key != "ref_logprobs"}
    checkpoint = Checkpoint(Path("checkpoint-4"), {"kt_runtime": {"identity": older, "settings": {}}})
    assert check_same_run(checkpoint, identified(), {}) == []
    with pytest.raises(ConflictError, match="ref_logprobs: was 'twin', is 'serving'"):
        check_same_run(checkpoint, identified(ref_logprobs="serving"), {})
