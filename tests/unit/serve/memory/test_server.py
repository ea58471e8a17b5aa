"""`models show` and `serve` plan the same memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from reference.cases import choose

from kt_runtime.cli import models
from kt_runtime.cli.serve import command
from kt_runtime.cli.server_process import free_port
from kt_runtime.errors import InvalidValueError, NotFoundError
from kt_runtime.serve import launch
from kt_runtime.serve.memory import server as server_memory
from kt_runtime.serve.memory.plan import GIB, TRAINED, MemoryNeed, MemoryPlan, check_fits, format_bytes
from kt_runtime.serve.memory.server import (
    plan_server,
    serving_shape,
    session_memory_bytes,
    with_lora_rank,
    with_lora_slots,
    with_microbatch,
)
from kt_runtime.serve.models.presets import load_preset, preset_names
from kt_runtime.serve.options.named import ServeOptions

PRESETS = preset_names()
FAMILIES = {load_preset(name).config["model_type"]: name for name in PRESETS}
CASES = choose(few=[name for name in PRESETS if name in FAMILIES.values()], usual=PRESETS, every=PRESETS)


@pytest.mark.parametrize("with_gpu", [False, True])
@pytest.mark.parametrize("name", CASES)
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


@pytest.mark.parametrize("name", [name for name in CASES if not load_preset(name).is_made])
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
    assert shape.runs_jobs and not serving_shape(replace(options, finetuning_dir="off"), with_gpu=True).runs_jobs
    name = "tiny-qwen3-moe"
    plans = [plan_server(asked, load_preset(name).config, name)[0] for asked in (options, ServeOptions(model="m"))]
    assert plans[0].needs != plans[1].needs


def test_memory_for_adapters_is_a_slot_for_each_request_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the plan counts the memory, not the slots."""
    monkeypatch.setattr(server_memory, "has_gpu", lambda: False)
    monkeypatch.setattr(server_memory, "available_memory", lambda with_gpu, index=0: {"cpu": 2**40})
    config, asked = load_preset("Qwen3-30B-A3B").config, ServeOptions(model="m", lora_memory_bytes=GIB)
    options = with_lora_slots(asked, config)
    assert options.lora_slots == asked.max_running_requests + 1
    plan, _ = plan_server(options, config, "m")
    [need] = [need for need in plan.needs if need.what == "LoRA slots"]
    assert (need.size_bytes, need.lower) == (GIB, ("--lora-memory",))
    assert with_lora_slots(ServeOptions(model="m"), config).lora_slots == 8


def test_memory_for_adapters_is_divided_by_the_slot_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_memory, "has_gpu", lambda: True)
    config = load_preset("tiny-qwen3-moe").config
    slot_bytes = 64 * sum(
        (each.in_features + each.out_features) * max(1, each.num_experts) * 2
        for each in server_memory.family_for(config).lora_modules(config)
    )
    asked = ServeOptions(model="m", lora_memory_bytes=3 * slot_bytes + 1)
    assert with_lora_slots(asked, config).lora_slots == 3
    with pytest.raises(InvalidValueError, match=r"--lora-memory: .* hold 1 slots of rank 64, of .*need two"):
        with_lora_slots(replace(asked, lora_memory_bytes=slot_bytes), config)


def test_a_limit_of_the_sessions_is_what_the_plan_counts_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_memory, "has_gpu", lambda: False)
    monkeypatch.setattr(server_memory, "available_memory", lambda with_gpu, index=0: {"cpu": 2**40})
    config = load_preset("Qwen3-30B-A3B").config
    needs = [
        next(need for need in plan_server(options, config, "m")[0].needs if need.what == TRAINED)
        for options in (ServeOptions(model="m", session_memory_bytes=limit) for limit in (GIB, 1000 * GIB, None))
    ]
    assert (needs[0].size_bytes, needs[0].lower) == (GIB, ("--session-memory",))
    assert needs[1] == needs[2] and needs[1].size_bytes > 10 * GIB


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


def invented(monkeypatch: pytest.MonkeyPatch, *gpus_gib: float, cpu_gib: int = 1000) -> None:
    """A machine with GPUs that have this much free memory; without any, one with a CPU only."""

    def free(with_gpu: bool, index: int = 0) -> dict[str, int]:
        gpu = {"gpu": int(gpus_gib[index] * GIB)} if with_gpu else {}
        return {"cpu": cpu_gib * GIB, **gpu}

    monkeypatch.setattr(server_memory, "has_gpu", lambda: bool(gpus_gib))
    monkeypatch.setattr(server_memory, "available_memory", free)


QWEN = load_preset("Qwen3-30B-A3B").config
QWEN_EXPERT_BYTES = 3 * 2048 * 768 * 2


def needs(options: ServeOptions, device: str = "gpu") -> dict[str, int]:
    plan = plan_server(options, QWEN, "qwen")[0]
    return {need.what: need.size_bytes for need in plan.needs if need.device == device}


def test_the_named_gpus_memory_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    invented(monkeypatch, 8, 24)
    options = ServeOptions(model="m", max_lora_rank=8, stream_experts="512")
    with pytest.raises(InvalidValueError, match=r"on the GPU and 8 GiB are free \(.*ring of streamed experts"):
        check_fits(*plan_server(replace(options, device="cuda:0"), QWEN, "qwen"))
    check_fits(*plan_server(replace(options, device="cuda:1"), QWEN, "qwen"))


def test_a_server_on_the_cpu_plans_no_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    invented(monkeypatch, 24)
    plan, free_bytes = plan_server(ServeOptions(model="m", device="cpu"), QWEN, "qwen")
    assert plan.devices() == ["cpu"] and set(free_bytes) == {"cpu"} and plan.ring_chunk_experts == 0
    invented(monkeypatch)
    assert plan_server(ServeOptions(model="m"), QWEN, "qwen")[0] == plan


def test_a_gpu_also_holds_hot_experts_a_ring_and_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    invented(monkeypatch, 80)
    options = ServeOptions(model="m", max_lora_rank=8, gpu_experts_bytes=3 * GIB)
    plan, gpu = plan_server(options, QWEN, "qwen")[0], needs(options)
    assert gpu["hot experts"] == 3 * GIB and "dequantized hot experts" not in gpu
    quantized = needs(replace(options, expert_format="int4"))
    assert 2**27 < quantized["dequantized hot experts"] < 2**28
    assert "dequantized hot experts" not in needs(replace(options, expert_format="int4", gpu_experts_format="model"))
    assert 1 <= plan.ring_chunk_experts <= 16
    assert gpu["ring of streamed experts"] == 2 * plan.ring_chunk_experts * QWEN_EXPERT_BYTES
    assert gpu["tensors of streamed calls (estimate)"] > 2048 * 8 * (2 * 2 * 2048)
    host = needs(options, "cpu")
    assert host["pinned buffers of the ring"] == gpu["ring of streamed experts"]
    assert host["pinned rows for the experts"] == 8192 * (3 * 2048 * 2 + 12 * 8)


def test_the_ring_gets_smaller_where_the_gpu_is_nearly_full(monkeypatch: pytest.MonkeyPatch) -> None:
    invented(monkeypatch, 80)
    options = ServeOptions(model="m", max_lora_rank=8)
    plan = plan_server(options, QWEN, "qwen")[0]
    ring = needs(options)["ring of streamed experts"]
    assert plan.ring_chunk_experts > 2
    invented(monkeypatch, (plan.total_bytes("gpu") - ring + 2 * 2 * QWEN_EXPERT_BYTES) / GIB)
    smaller = plan_server(options, QWEN, "qwen")
    assert smaller[0].ring_chunk_experts == 2
    check_fits(*smaller)


def test_without_room_for_a_ring_there_is_none_unless_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ServeOptions(model="m", max_lora_rank=8)
    invented(monkeypatch, 80)
    off = plan_server(replace(options, stream_experts="off"), QWEN, "qwen")[0]
    assert off.ring_chunk_experts == 0
    invented(monkeypatch, (off.total_bytes("gpu") + 2**20) / GIB)
    assert plan_server(options, QWEN, "qwen")[0] == off
    asked = replace(options, stream_experts="512")
    with pytest.raises(InvalidValueError, match="--stream-experts"):
        check_fits(*plan_server(asked, QWEN, "qwen"))


def test_training_that_does_not_fit_is_cut_and_below_the_floor_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ServeOptions(model="m", max_lora_rank=8, microbatch_tokens=4096, stream_experts="off")
    invented(monkeypatch, 1000)
    assert with_microbatch(options, QWEN, "qwen") is options
    sizes = {}
    for tokens in (4096, 2048, 512, 128):
        plan = plan_server(replace(options, microbatch_tokens=tokens), QWEN, "qwen")[0]
        sizes[tokens] = plan.total_bytes("gpu")
    for tokens, size_bytes in sizes.items():
        invented(monkeypatch, size_bytes / GIB)
        assert with_microbatch(options, QWEN, "qwen").microbatch_tokens == tokens
        check_fits(*plan_server(replace(options, microbatch_tokens=tokens), QWEN, "qwen"))
    invented(monkeypatch, (sizes[128] - 2**20) / GIB)
    assert with_microbatch(options, QWEN, "qwen") is options
    with pytest.raises(InvalidValueError, match=r"--microbatch-tokens"):
        check_fits(*plan_server(options, QWEN, "qwen"))
    asked = replace(options, microbatch_tokens=64)  # whoever asks for fewer gets fewer
    assert with_microbatch(asked, QWEN, "qwen") is asked
    check_fits(*plan_server(asked, QWEN, "qwen"))
