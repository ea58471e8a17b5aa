"""Lists of modules as people read them."""

from __future__ import annotations

from kt_runtime.train.stages.targets import patterns, ranges


def test_layers_become_ranges_and_projections_stand_side_by_side() -> None:
    modules = [f"model.layers.{layer}.self_attn.{name}" for layer in range(3) for name in ("q_proj", "o_proj")]
    modules += [f"model.layers.{layer}.mlp.experts.up_proj" for layer in (1, 2)] + [
        "model.layers.0.mlp.up_proj",
        "head",
    ]
    assert patterns(modules) == [
        "model.layers.{0-2}.self_attn.{q_proj,o_proj}",
        "model.layers.{1-2}.mlp.experts.up_proj",
        "model.layers.0.mlp.up_proj",
        "head",
    ]


def test_ranges_leave_gaps() -> None:
    assert ranges([7, 1, 2, 3, 5]) == "1-3,5,7" and ranges([]) == ""
