"""`models show` and `serve` plan the same memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from kt_runtime.cli import models
from kt_runtime.cli.serve import command
from kt_runtime.cli.server_process import free_port
from kt_runtime.errors import InvalidValueError, NotFoundError
from kt_runtime.serve import launch
from kt_runtime.serve.memory import server as server_memory
from kt_runtime.serve.memory.plan import TRAINED, MemoryNeed, MemoryPlan, check_fits, format_bytes
from kt_runtime.serve.memory.server import plan_server, serving_shape, session_memory_bytes, with_lora_rank
from kt_runtime.serve.models.presets import load_preset, preset_names
from kt_runtime.serve.options.named import ServeOptions


@pytest.mark.parametrize("with_gpu", [False, True])
@pytest.mark.parametrize("name", preset_names())
def test_show_and_serve_agree_for_every_preset(name: str, with_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_memory, "has_gpu", lambda: with_gpu)
    monkeypatch.setattr(server_memory, "available_memory", lambda with_gpu, index=0: {"cpu": 0})
    shown = models.describe(name)
    needed = {device: format_bytes(sizes["needed_bytes"]) for device, sizes in shown["devices"].items()}
    assert set(needed) == ({"cpu", "gpu"} if with_gpu else {"cpu"})
    with pytest.raises(InvalidValueError) as refused:  # serve's own check, on a machine that has no memory at all
        config = load_preset(name).config
        options = with_lora_rank(ServeOptions(model=name, lora_rank_may_be_lower=True), config, name)
        check_fits(*launch.plan_server(options, config, name))
    for device, size in needed.items():
        assert f"it needs {size} on the {device.upper()} and 0 B are free" in str(refused.value)


@pytest.mark.parametrize("name", [name for name in preset_names() if not load_preset(name).is_made])
def test_a_preset_that_is_not_here_is_refused_with_what_show_says(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("KT_RUNTIME_MODELS", str(tmp_path))
    monkeypatch.setattr(server_memory, "available_memory", lambda with_gpu, index=0: {"cpu": 1 << 34})
    needed = format_bytes(models.describe(name)["devices"]["cpu"]["needed_bytes"])
    asked = ["--model", name, "--port", str(free_port()), "--runtime-dir", str(tmp_path)]
    refused = CliRunner().invoke(command, asked, standalone_mode=False).exception
    assert isinstance(refused, NotFoundError) and f"it needs {needed} on the CPU" in str(refused)


def test_the_plan_follows_the_options() -> None:
    options = ServeOptions(
        model="m", max_total_tokens=4096, lora_slots=3, max_lora_rank=5, microbatch_tokens=100, dtype="float32"
    )
    shape = serving_shape(options, with_gpu=True)
    assert (shape.device, shape.max_total_tokens, shape.lora_slots, shape.lora_rank) == ("gpu", 4096, 3, 5)
    assert (shape.training_tokens, shape.activation_bytes, shape.tokens_option) == (100, 4, "--max-total-tokens")
    name = "tiny-qwen3-moe"
    plans = [plan_server(asked, load_preset(name).config, name)[0] for asked in (options, ServeOptions(model="m"))]
    assert plans[0].needs != plans[1].needs


@pytest.mark.parametrize(("gib", "rank"), [(400, 64), (150, 32), (100, 16), (80, 8), (1, 8)])
def test_the_default_rank_is_the_highest_that_fits(gib: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_memory, "has_gpu", lambda: False)
    monkeypatch.setattr(server_memory, "available_memory", lambda with_gpu, index=0: {"cpu": gib * 2**30})
    name = "Qwen3-30B-A3B"
    config = load_preset(name).config
    options = ServeOptions(model=name, lora_rank_may_be_lower=True)
    assert (options.max_lora_rank, with_lora_rank(options, config, name).max_lora_rank) == (64, rank)
    asked = ServeOptions(model=name, max_lora_rank=48)
    assert with_lora_rank(asked, config, name) is asked


def test_training_sessions_get_one_at_the_highest_rank_and_half_of_what_is_left() -> None:
    plan = MemoryPlan("m", (MemoryNeed("weights", "cpu", 100), MemoryNeed(TRAINED, "cpu", 40)))
    assert session_memory_bytes(plan, {"cpu": 200}) == 40 + 30
    assert session_memory_bytes(plan, {"cpu": 100}) == 40
    one = plan_server(ServeOptions(model="m"), load_preset("tiny-qwen3-moe").config, "m")[0]
    assert session_memory_bytes(one, {"cpu": 0}) == next(need.size_bytes for need in one.needs if need.what == TRAINED)
