"""GGUF models on two ranks: the answers, adapters and training steps of one rank, bit for bit, of a share of it.

Linear layers keep the file's blocks. Ranks have rows of them; for backward they have columns of all rows, whole blocks.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from reference import lora
from reference.cases import choose
from reference.checkpoints.gguf_models import expressible, requantize
from reference.ranks.sessions import FEWER, STEPS, answers_of, trained

from kt_runtime.bench.serve.gguf.model import write_gguf_model
from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.server_process import server
from kt_runtime.families import family_for
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire.replies import STEP_RUNNING

PLAIN = {"ffn_gate_inp": "F32"}  # the router
OF_32 = {
    **PLAIN,
    "_exps.weight": "Q8_0",
    "attn_v.": "Q5_0",
    "attn_output.": "Q8_0",
    "output.": "MXFP4",
    "attn_q.": "Q4_0",
    "attn_k.": "Q8_0",
    "attn_q_a.": "Q8_0",
    "attn_q_b.": "Q4_0",
    "attn_kv_a_mqa.": "IQ4_NL",
    "attn_qkv.": "Q8_0",
    "attn_gate.": "Q4_0",
    "ssm_out.": "Q5_0",
    "ffn_gate_shexp.": "Q8_0",
    "ffn_up_shexp.": "Q5_0",
    "ffn_down_shexp.": "MXFP4",
    "ffn_gate.": "Q4_0",
    "ffn_up.": "IQ4_NL",
    "ffn_down.": "Q8_0",
}
WIDE = {"hidden_size": 512, "moe_intermediate_size": 256}  # a rank's 256 inputs are one block of Q4_K
OF_256 = {"ffn_down_exps": "Q6_K", "_exps": "Q4_K", "attn_output": "Q8_0", "attn_v": "Q6_K", "attn_": "Q4_K"}
CASES: dict[str, tuple[str, Mapping[str, int], Mapping[str, str]]] = {
    "Q8_0": ("tiny-qwen3-moe", {}, {**PLAIN, "_exps.": "Q8_0", "attn_": "Q8_0", "output.": "Q8_0"}),
    "Q4_K": ("tiny-qwen3-moe", WIDE, {**PLAIN, **OF_256, "output.": "Q6_K"}),
    "mixtral": ("tiny-mixtral", {}, OF_32),  # its heads' rows have another order in the file
    "glm4_moe": ("tiny-glm4-moe", {}, OF_32),
    "deepseek_v3": ("tiny-deepseek-v3", {}, OF_32),
    "gpt_oss": ("tiny-gpt-oss", {}, {**OF_32, "_exps.weight": "MXFP4"}),
    "qwen3_5_moe": ("tiny-qwen3-5-moe-text", {}, OF_32),  # in_proj_qkv is of three kinds of rows
}
"""Preset, changes of its config, and types by parts of names: the first that fits."""
KEPT = re.compile(r"TP1.* (\d+) linear layers keep the file's quantized matrices")


@contextlib.contextmanager
def running(directory: Path, name: str, *options: str) -> Iterator[ServerAPI]:
    arguments = ["--expert-threads", "1", "--max-lora-rank", "8", "--adapter-dir", str(directory / f"{name}-adapters")]
    passed_on = ["--", "--chunked-prefill-size", "64"]
    with server(str(directory / "model.gguf"), [*arguments, *options, *passed_on], directory / f"{name}.log") as api:
        yield api


def make_gguf(directory: Path, case: str) -> dict[str, object]:
    """model.gguf, and an adapter `given` for it. Returns the Hugging Face config."""
    name, changes, types = CASES[case]
    preset = expressible(name)
    preset = msgspec.structs.replace(preset, config={**preset.config, **changes})
    make_model(preset, directory / "model", seed=6)
    write_gguf_model(directory / "model", directory / "bf16.gguf")
    requantize(directory / "bf16.gguf", directory / "model.gguf", types)
    config: dict[str, object] = json.loads((directory / "model" / "config.json").read_text(encoding="utf-8"))
    lora.write_adapter(directory / "given", lora.random_adapter(config, rank=6, alpha=12.0, seed=2))
    return config


def status_of(api: ServerAPI) -> dict[str, Any]:
    """With the fingerprint, whose computation it waits for."""
    status: dict[str, Any] = api.get("/kt/status?verify=true")
    return status


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("case", choose(few=["Q8_0"], usual=["Q8_0", "Q4_K", "glm4_moe"], every=[*CASES]))
def test_two_ranks_have_the_bits_of_one(tmp_path: Path, case: str) -> None:
    config = make_gguf(tmp_path, case)
    assert family_for(config).splits_over_ranks
    with running(tmp_path, "one") as api:
        answers, session, whole = answers_of(api, tmp_path), trained(api, tmp_path, "one"), status_of(api)
    assert len({session[f"loss {step}"] for step in range(STEPS)}) == STEPS
    with running(tmp_path, "two", "--tp-size", "2", "--exact") as api:
        assert answers_of(api, tmp_path) == answers
        for name, value in trained(api, tmp_path, "two").items():
            assert value == session[name], name
        status = status_of(api)
    assert status["fingerprint"] == whole["fingerprint"]  # a registry takes both
    assert (status["step"], status["step_exceptions"], len(status["ranks"])) == (STEP_RUNNING, [], 2)
    kept = KEPT.search((tmp_path / "two.log").read_text(errors="replace"))
    assert kept is not None and int(kept[1]) > 0
    assert [rank["expert_bytes"] for rank in status["ranks"]] == [whole["expert_bytes"] // 2] * 2
    with running(tmp_path, "modules", "--tp-size", "2", "--no-step") as api:
        assert answers_of(api, tmp_path, FEWER).items() <= answers.items()
