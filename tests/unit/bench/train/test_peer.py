"""The process that fine-tunes with Hugging Face + PEFT, and the dtype that is chosen for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kt_runtime.bench.train import peer
from kt_runtime.bench.train.plan import Plan
from kt_runtime.errors import RuntimeFault
from kt_runtime.serve.models.make_model import write_configs
from kt_runtime.serve.models.presets import load_preset


def test_a_peer_that_does_not_end_is_a_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peer, "TIMEOUT_S", 0.01)
    write_configs(tmp_path, load_preset("tiny-qwen3-moe").config)
    unasked = peer.Peer(Plan(), tmp_path, np.zeros((1, 4), np.int64), lambda _: None)
    with pytest.raises(RuntimeFault, match=r"Hugging Face \+ PEFT: attention in .* did not end within 0 s"):
        unasked.choose_dtype()


@pytest.mark.parametrize(
    ("seconds", "asked", "chosen"),
    [
        ({32: {"bfloat16": 8.0, "float32": 1.0}}, [32, 32], "float32"),
        (
            {32: {"bfloat16": 1.0, "float32": 0.9}, 100: {"bfloat16": 1.0, "float32": 3.0}},
            [32, 32, 100, 100],
            "bfloat16",
        ),
    ],
)
def test_a_whole_sequence_chooses_the_peers_dtype_where_a_short_one_does_not_tell(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, dict[str, float]], asked: list[int], chosen: str
) -> None:
    made = peer.Peer(Plan(tokens=100), Path("none"), np.zeros((2, 100), dtype=np.int64), lambda line: None)
    tokens: list[int] = []

    def ask(targets: str, activations: str, dtype: str, some: Any, *rest: Any) -> dict[str, Any]:
        tokens.append(some.shape[1])
        return {"seconds": [9.0, seconds[some.shape[1]][dtype]]}

    monkeypatch.setattr(made, "_ask", ask)
    made.choose_dtype()
    assert tokens == asked
    assert made.dtype == chosen
    assert made.probe_tokens == asked[-1]
