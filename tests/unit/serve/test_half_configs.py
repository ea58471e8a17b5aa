"""A config.json that lacks half of a family's keys is refused before anything is loaded, by the name of a key."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from reference.cases import choose
from reference.families import PRESETS
from reference.server.serve_options import options

from kt_runtime.errors import UserError
from kt_runtime.serve import launch
from kt_runtime.serve.models.make_model import make_model

WITH_MECHANISMS = ("qwen3_next", "qwen3_5_moe_text", "deepseek_v32", "glm_moe_dsa", "gpt_oss", "llama4_text")
HALVES = choose(few=range(4), usual=range(8), every=range(40))


def half(config: dict[str, Any], seed: int) -> dict[str, Any]:
    """Without a random half of the keys. What names the family stays."""
    named = {key: config[key] for key in ("architectures", "model_type")}
    others = sorted(config.keys() - named.keys())
    kept = random.Random(seed).sample(others, len(others) // 2)
    return {**named, **{key: config[key] for key in kept}}


@pytest.mark.parametrize("family", WITH_MECHANISMS)
def test_half_of_a_family_s_keys_are_refused_before_loading(
    tmp_path: Path, started: list[Any], port: int, private_directory: Path, family: str
) -> None:
    model = make_model(PRESETS[family], tmp_path / "model")
    whole = json.loads((model / "config.json").read_text())
    for seed in HALVES:
        found = half(whole, seed)
        (model / "config.json").write_text(json.dumps(found))
        with pytest.raises(UserError) as refused:
            launch.serve(options(model, port, private_directory), print)
        missing = whole.keys() - found.keys()
        assert "config.json" in str(refused.value), (seed, refused.value)
        assert any(f"'{key}'" in str(refused.value) for key in missing), (seed, refused.value)
    assert not started
    (model / "config.json").write_text(json.dumps(whole))
    launch.serve(options(model, port, private_directory), print)
    assert len(started) == 1
