"""SGLang's own parser takes the arguments that we compute."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest
from reference.checkpoints.quantized_checkpoint import quantize_checkpoint

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.report import resolve_model
from kt_runtime.serve.options.cache_plan import CachePlan
from kt_runtime.serve.options.named import ServeOptions
from kt_runtime.sglang_patch.arguments import GRAPH_PREFILL_TOKENS, option_names, server_arguments


@pytest.fixture(scope="module")
def parser(patched_sglang: None) -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser


@pytest.mark.parametrize(
    ("device", "found"),
    [
        ("cpu", ("cpu", 0, "kt_cpu", "torch_native")),
        ("cuda:0", ("cuda", 0, None, "csgmv")),
        ("cuda:1", ("cuda", 1, None, "csgmv")),
        ("other:0", ("other", 0, "torch_native", "torch_native")),
    ],
)
def test_the_device_of_the_options_is_sglangs(
    parser: argparse.ArgumentParser, tmp_path: Path, device: str, found: tuple[str, int, str | None, str]
) -> None:
    """An accelerator that is not CUDA gets PyTorch's operators."""
    make_model("tiny-qwen3-moe", tmp_path / "model")
    options = ServeOptions(model="", device=device)
    parsed = parser.parse_args(server_arguments(options, resolve_model(tmp_path / "model")))
    assert (parsed.device, parsed.base_gpu_id, parsed.attention_backend, parsed.lora_backend) == found
    assert parsed.cuda_graph_backend_decode == ("breakable" if found[0] == "cuda" else "disabled")


@pytest.mark.parametrize("preset", ["tiny-deepseek-v3", "tiny-qwen3-moe"])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_sglang_parses_them(parser: argparse.ArgumentParser, tmp_path: Path, preset: str, on_cpu: bool) -> None:
    make_model(preset, tmp_path / "model", seed=0)
    options = ServeOptions(model="", port=1234, dtype="float32", context_tokens=512, lora_slots=3, max_lora_rank=8)
    arguments = server_arguments(options, resolve_model(tmp_path / "model"), on_cpu=on_cpu)
    parsed = parser.parse_args(arguments)
    assert (parsed.port, parsed.dtype, parsed.context_length) == (1234, "float32", 512)
    assert (parsed.max_loras_per_batch, parsed.max_lora_rank, parsed.lora_strict_loading) == (3, 8, True)
    assert parsed.attention_backend == ("kt_cpu" if on_cpu else None)
    assert parsed.lora_backend == ("torch_native" if on_cpu else "csgmv")
    assert "gate_proj" in parsed.lora_target_modules
    assert parsed.disable_overlap_schedule
    assert parsed.disable_shared_experts_fusion


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_are_split_by_expert_over_all_ranks(
    parser: argparse.ArgumentParser, tmp_path: Path, ranks: int
) -> None:
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=0)
    options = ServeOptions(model="", tp_size=ranks)
    parsed = parser.parse_args(server_arguments(options, resolve_model(tmp_path / "model"), on_cpu=True))
    assert (parsed.tp_size, parsed.ep_size, parsed.grammar_backend) == (ranks, ranks, None)


@pytest.mark.parametrize(
    ("on_cpu", "no_graphs", "backend"),
    [(False, False, "breakable"), (False, True, "disabled"), (True, False, "disabled")],
)
def test_an_accelerator_captures_breakable_graphs(
    parser: argparse.ArgumentParser, tmp_path: Path, on_cpu: bool, no_graphs: bool, backend: str
) -> None:
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=0)
    options = ServeOptions(model="", max_running_requests=24, no_graphs=no_graphs)
    parsed = parser.parse_args(server_arguments(options, resolve_model(tmp_path / "model"), on_cpu=on_cpu))
    assert (parsed.cuda_graph_backend_decode, parsed.cuda_graph_backend_prefill) == (backend, backend)
    most = (24, GRAPH_PREFILL_TOKENS) if backend == "breakable" else (None, None)
    assert (parsed.cuda_graph_max_bs_decode, parsed.cuda_graph_max_bs_prefill) == most
    assert parsed.disable_overlap_schedule, "see the reasons in arguments.py"


def test_captured_prefills_fit_into_the_kv_cache(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=0)
    options = ServeOptions(model="", max_total_tokens=96)
    parsed = parser.parse_args(server_arguments(options, resolve_model(tmp_path / "model"), on_cpu=False))
    assert parsed.cuda_graph_max_bs_prefill == 96


def test_captured_decode_sizes_end_with_the_most_running_requests(
    parser: argparse.ArgumentParser, tmp_path: Path
) -> None:
    """As SGLang computes them from the arguments."""
    from types import SimpleNamespace

    from sglang.srt.arg_groups.cuda_graph_hook import generate_decode_cuda_graph_batch_sizes

    make_model("tiny-qwen3-moe", tmp_path / "model", seed=0)
    options = ServeOptions(model="", max_running_requests=21)
    parsed = parser.parse_args(server_arguments(options, resolve_model(tmp_path / "model"), on_cpu=False))
    assert (parsed.cuda_graph_bs_decode, parsed.max_running_requests) == (None, 21)
    sizes = generate_decode_cuda_graph_batch_sizes(
        SimpleNamespace(**vars(parsed), attn_tp_size=1), parsed.cuda_graph_max_bs_decode
    )
    assert sizes[-1] == 21 and sizes == sorted(set(sizes))


def test_the_users_graph_options_come_last(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=0)
    given = ("--cuda-graph-backend-prefill", "disabled", "--cuda-graph-bs-decode", "1", "4")
    options = ServeOptions(model="", passed_on=given)
    parsed = parser.parse_args(server_arguments(options, resolve_model(tmp_path / "model"), on_cpu=False))
    assert (parsed.cuda_graph_backend_decode, parsed.cuda_graph_backend_prefill) == ("breakable", "disabled")
    assert parsed.cuda_graph_bs_decode == [1, 4]


@pytest.mark.parametrize(
    ("on_cpu", "no_graphs", "message"),
    [(True, False, "--cuda-graph-bs-decode=4 can't.*no accelerator"), (False, True, "--no-graphs excludes it")],
)
def test_options_of_graphs_are_refused_where_there_are_none(
    tmp_path: Path, on_cpu: bool, no_graphs: bool, message: str
) -> None:
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=0)
    options = ServeOptions(model="", no_graphs=no_graphs, passed_on=("--cuda-graph-bs-decode=4",))
    with pytest.raises(InvalidValueError, match=message):
        server_arguments(options, resolve_model(tmp_path / "model"), on_cpu=on_cpu)


def test_a_quantized_checkpoint_is_no_quantized_model_to_sglang(
    parser: argparse.ArgumentParser, tmp_path: Path
) -> None:
    from sglang.srt.utils.hf_transformers import get_config

    make_model("tiny-deepseek-v3", tmp_path / "model", seed=0)
    directory, _ = quantize_checkpoint(tmp_path / "model", tmp_path, "fp8")
    model = resolve_model(directory)
    assert model.config["quantization_config"]["quant_method"] == "fp8"
    parsed = parser.parse_args(server_arguments(ServeOptions(model=""), model, on_cpu=True))
    assert parsed.quantization == "unquant"
    overrides = json.loads(parsed.json_model_override_args)
    read = get_config(str(directory), trust_remote_code=False, model_override_args=overrides)
    assert read.quantization_config is None
    assert read.hidden_size == model.config["hidden_size"]


def test_what_the_user_passes_on_comes_last(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=0)
    options = ServeOptions(model="", passed_on=("--mem-fraction-static", "0.5"))
    parsed = parser.parse_args(server_arguments(options, resolve_model(tmp_path / "model"), on_cpu=True))
    assert parsed.mem_fraction_static == 0.5


def test_option_names_are_complete_and_dashed(patched_sglang: None) -> None:
    names = option_names()
    assert {"--model-path", "--page-size", "--no-lora-strict-loading"} <= names
    assert all(name.startswith("-") for name in names)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_caches_tiers_are_sglangs_with_our_disk_behind_them(
    parser: argparse.ArgumentParser, tmp_path: Path, on_cpu: bool
) -> None:
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=0)
    plan = CachePlan(16, 768, 512, 1024, 1 << 20, tmp_path / "cache")
    options = ServeOptions(model="", cache=plan)
    parsed = parser.parse_args(server_arguments(options, resolve_model(tmp_path / "model"), on_cpu=on_cpu))
    assert (parsed.max_total_tokens, parsed.page_size, parsed.enable_hierarchical_cache) == (512, 16, True)
    assert (int(512 * parsed.hicache_ratio) // 16 + 1) * 16 == 1024  # as SGLang computes it
    copies = ("direct", "page_first_direct") if on_cpu else ("kernel", "page_first")
    assert (parsed.hicache_io_backend, parsed.hicache_mem_layout) == copies
    assert parsed.hicache_write_policy == "write_through"
    extra = json.loads(parsed.hicache_storage_backend_extra_config)
    assert (parsed.hicache_storage_backend, extra["prefetch_threshold"]) == ("dynamic", 16)
    assert pkgutil.resolve_name(f"{extra['module_path']}:{extra['class_name']}").__name__ == "DiskBackend"


@pytest.mark.parametrize("plan", [None, CachePlan(1, 768, 512, 0, 0, None)])
def test_without_a_host_tier_sglang_is_asked_for_none(tmp_path: Path, plan: CachePlan | None) -> None:
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=0)
    arguments = server_arguments(ServeOptions(model="", cache=plan), resolve_model(tmp_path / "model"), on_cpu=True)
    assert not [argument for argument in arguments if "hicache" in argument or "hierarchical" in argument]


def test_sparse_attention_is_refused_with_tiers_and_by_name(tmp_path: Path) -> None:
    make_model("tiny-deepseek-v3", tmp_path / "sparse", seed=0)
    model = resolve_model(tmp_path / "sparse")
    model = dataclasses.replace(model, config={**model.config, "index_topk": 2048})
    plan = CachePlan(16, 480, 512, 1024, 0, None)
    with pytest.raises(InvalidValueError, match=r"sparse.*index_topk 2048"):
        server_arguments(ServeOptions(model="", cache=plan), model, on_cpu=True)


def test_a_model_with_states_has_pages_of_one_token_and_a_pool_for_its_streams(
    parser: argparse.ArgumentParser, tmp_path: Path
) -> None:
    make_model("tiny-qwen3-next", tmp_path / "model")
    model, options = resolve_model(tmp_path / "model"), ServeOptions(model="", max_running_requests=5)
    parsed = parser.parse_args(server_arguments(options, model, on_cpu=True))
    assert (parsed.page_size, parsed.max_mamba_cache_size) == (1, 20)
    assert "in_proj_qkvz" not in parsed.lora_target_modules  # `delta.lora` adds it
    asked = dataclasses.replace(options, passed_on=("--max-mamba-cache-size", "15"))
    assert parser.parse_args(server_arguments(asked, model, on_cpu=True)).max_mamba_cache_size == 15


@pytest.mark.parametrize(
    ("changes", "on_cpu", "message"),
    [
        (
            {"passed_on": ("--max-mamba-cache-size", "14")},
            True,
            "14: .* at least 15 slots for --max-running-requests 5",
        ),
        ({"passed_on": ("--page-size=8",)}, True, "--page-size 8: qwen3_next keeps a state"),
        ({"cache_disk_bytes": 1 << 30}, True, "--cache-disk: qwen3_next keeps a state .* record for each token"),
        ({"cache_page_tokens": 8}, True, "--cache-page-tokens 8: qwen3_next keeps a state .* pages of 1 token"),
        ({}, False, "qwen3_next keeps a state .* CPU only"),
    ],
)
def test_of_a_model_with_states_what_does_not_fit_is_refused_with_the_numbers(
    tmp_path: Path, changes: dict[str, Any], on_cpu: bool, message: str
) -> None:
    make_model("tiny-qwen3-next", tmp_path / "model")
    options = dataclasses.replace(ServeOptions(model="", max_running_requests=5), **changes)
    with pytest.raises(InvalidValueError, match=message):
        server_arguments(options, resolve_model(tmp_path / "model"), on_cpu=on_cpu)
