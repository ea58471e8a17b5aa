"""The memory planned for captured graphs is what SGLang leaves free for them, and none where none is captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.memory import server as server_memory
from kt_runtime.serve.memory.graphs import MIB, PREFILL_LENGTHS, graph_bytes
from kt_runtime.serve.memory.plan import GIB, ServingShape, check_fits, plan_memory
from kt_runtime.serve.memory.server import serving_shape
from kt_runtime.serve.models.presets import load_preset
from kt_runtime.serve.options.named import ServeOptions
from kt_runtime.sglang_patch.arguments import GRAPH_PREFILL_TOKENS

GROUPED, LATENT = load_preset("Qwen3-30B-A3B").config, load_preset("DeepSeek-V3-bf16").config


def reserved_by_sglang(monkeypatch: pytest.MonkeyPatch, *, latent: bool, requests: int, prefill_tokens: int) -> float:
    """In MiB; 0 requests or tokens: that phase captures nothing."""
    from sglang.srt.arg_groups import memory_hook
    from sglang.srt.arg_groups.cuda_graph_hook import generate_prefill_cuda_graph_batch_sizes
    from sglang.srt.model_executor.cuda_graph_config import Backend

    lengths = generate_prefill_cuda_graph_batch_sizes(prefill_tokens)
    phases = SimpleNamespace(
        decode=SimpleNamespace(backend=Backend.BREAKABLE if requests else Backend.DISABLED, max_bs=requests),
        prefill=SimpleNamespace(backend=Backend.BREAKABLE if lengths else Backend.DISABLED, bs=lengths),
    )
    settings: Any = SimpleNamespace(cuda_graph_config=phases, disaggregation_mode="null", moe_a2a_backend="none")
    for name in ("resolving_view", "resolved_view"):
        monkeypatch.setattr(memory_hook, name, lambda given: given)
    monkeypatch.setattr(memory_hook, "attn_dp_enabled_of", lambda given: False)
    monkeypatch.setattr(memory_hook, "use_mla_backend", lambda given: latent)
    return float(memory_hook.reserve_for_graph_mb(settings))


@pytest.mark.parametrize("requests", [0, 1, 32])
@pytest.mark.parametrize("prefill_tokens", [0, 3, 40, GRAPH_PREFILL_TOKENS])
@pytest.mark.parametrize("latent", [False, True])
def test_the_estimate_is_sglang_s_reserve(
    monkeypatch: pytest.MonkeyPatch, latent: bool, prefill_tokens: int, requests: int
) -> None:
    wanted = reserved_by_sglang(monkeypatch, latent=latent, requests=requests, prefill_tokens=prefill_tokens)
    assert graph_bytes(LATENT if latent else GROUPED, requests, prefill_tokens) == wanted * MIB


def test_the_lengths_reach_as_far_as_kt_runtime_asks_for() -> None:
    assert PREFILL_LENGTHS[-1] == GRAPH_PREFILL_TOKENS


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({}, (7, 512)),
        ({"max_total_tokens": 96}, (7, 96)),
        ({"no_graphs": True}, (0, 0)),
        ({"passed_on": ("--cuda-graph-backend-prefill=disabled",)}, (7, 0)),
        ({"passed_on": ("--cuda-graph-backend-decode", "disabled", "--cuda-graph-max-bs-prefill", "64")}, (0, 64)),
        ({"passed_on": ("--cuda-graph-max-bs-decode=x",)}, (7, 512)),  # SGLang's parser refuses it
    ],
)
def test_graphs_are_planned_as_they_are_captured(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], wanted: tuple[int, int]
) -> None:
    options = ServeOptions(model="m", max_running_requests=7, **changed)
    monkeypatch.setattr(server_memory, "has_graphs", lambda: True)
    shape = serving_shape(options, with_gpu=True)
    assert (shape.graph_requests, shape.graph_prefill_tokens) == wanted
    assert serving_shape(options, with_gpu=False).graph_requests == 0
    monkeypatch.setattr(server_memory, "has_graphs", lambda: False)  # an accelerator that is not CUDA
    assert serving_shape(options, with_gpu=True).graph_prefill_tokens == 0


def test_a_gpu_without_room_for_graphs_is_refused_with_the_option_that_leaves_them_out() -> None:
    config = load_preset("tiny-qwen3-moe").config
    with_graphs = plan_memory(config, ServingShape(device="gpu", graph_requests=32, graph_prefill_tokens=512), "tiny")
    without = plan_memory(config, ServingShape(device="gpu"), "tiny")
    free = {"cpu": 64 * GIB, "gpu": without.total_bytes("gpu")}
    check_fits(without, free)
    with pytest.raises(
        InvalidValueError, match=r"captured graphs \(SGLang's estimate\) 304 MiB.*, or give --no-graphs"
    ):
        check_fits(with_graphs, free)
