"""SGLang gets every tensor but the routed experts."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from kt_runtime.serve.make_model import make_model
from kt_runtime.sglang_patch.weights import dense_tensors


def test_routed_experts_are_left_out_and_nothing_else(tmp_path: Path) -> None:
    make_model("tiny-deepseek-v3", tmp_path / "model", seed=0)
    files = sorted(str(path) for path in (tmp_path / "model").glob("*.safetensors"))
    expected = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            expected |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    experts = {name for name in expected if ".mlp.experts." in name}
    found = dict(dense_tensors(files))
    assert experts
    assert any("shared_experts" in name for name in found)
    assert set(found) == set(expected) - experts
    assert all(torch.equal(found[name], expected[name]) for name in found)
