"""What `bench gpu` measures and counts, as far as a machine without a GPU can tell."""

from __future__ import annotations

import json
import os
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from reference.on_device.gpu_report import LIMITS, report

from kt_runtime.bench.experts.limits import Limits
from kt_runtime.bench.gpu import limits
from kt_runtime.bench.gpu import run as gpu_run
from kt_runtime.bench.gpu.bars import bars
from kt_runtime.bench.gpu.limits import Sizes, measure_gpu_limits
from kt_runtime.bench.gpu.models import check_disk, checkpoint_bytes, make, shape
from kt_runtime.bench.gpu.needs import ExpertPlace, Needs, decode_needs, prefill_needs, training_needs
from kt_runtime.bench.gpu.plan import Plan
from kt_runtime.bench.gpu.report import print_report
from kt_runtime.bench.gpu.rows import Row
from kt_runtime.bench.gpu.servers import hit_rate_of, place_in, threshold_of
from kt_runtime.bench.gpu.settings import (
    kt_settings,
    resident_bytes,
    resident_counts,
    sglang_settings,
)
from kt_runtime.bench.gpu.stock import GROUPS, NO_PLUGIN, stock_arguments, stock_environment
from kt_runtime.bench.page.measurement import Measurement, Range, read_all
from kt_runtime.bench.page.report import record_report
from kt_runtime.bench.peer_place import BESIDES_BYTES, ON_CPU, PeerPlace, peer_place
from kt_runtime.bench.serve.plan import PREFILL, Case
from kt_runtime.bench.serve.work import model_work
from kt_runtime.cli.main import main
from kt_runtime.cli.serve import command as serve_command
from kt_runtime.errors import InvalidValueError, NotFoundError, UnknownNameError
from kt_runtime.serve.models.presets import load_preset
from kt_runtime.serve.options.named import ServeOptions
from kt_runtime.serve.options.sglang_names import NAMES

QWEN = load_preset("Qwen3-30B-A3B").config
WORK = model_work(QWEN, "bfloat16")
GIB = 1 << 30


def same(expected: Any) -> Any:
    """Equal but for the rounding of a few float64 operations."""
    return pytest.approx(expected, rel=1e-15, abs=0)


# The command


def test_without_a_gpu_the_command_refuses_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_run, "accelerator", lambda: None)
    monkeypatch.setattr(gpu_run, "driver_version", lambda: "")
    monkeypatch.setattr(gpu_run, "make", lambda *_: pytest.fail("a checkpoint is made"))
    with pytest.raises(InvalidValueError, match="torch sees none: no NVIDIA driver is loaded"):
        gpu_run.run(Plan(models=("tiny-qwen3-moe",)), lambda _: None)
    monkeypatch.setattr(gpu_run, "driver_version", lambda: "470.1")
    with pytest.raises(InvalidValueError, match=r"driver 470\.1 is too old for torch"):
        gpu_run.required_accelerator()


def test_the_command_line_ends_with_2_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_run, "accelerator", lambda: None)
    monkeypatch.setattr(gpu_run, "measured_on", lambda *_: pytest.fail("it measures"))
    assert main(["bench", "gpu", "--json", "--models", "tiny-qwen3-moe", "--resident", "0.5"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and "torch sees none" in said.err
    assert main(["bench", "gpu", "--resident", "2"]) == 2 and "--resident is 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"models": ()}, InvalidValueError, "--models names no model"),
        ({"resident_shares": (0.0,)}, InvalidValueError, "--resident is 0; must be a share"),
        ({"resident_shares": (1.5,)}, InvalidValueError, "--resident is 1.5"),
        ({"runs": 0}, InvalidValueError, "--runs is 0"),
        ({"streams": (0,)}, InvalidValueError, "--streams is 0"),
        ({"tokens": 1}, InvalidValueError, "--tokens is 1"),
        ({"peer": Path("no/such")}, NotFoundError, "--peer no/such"),
    ],
)
def test_a_plan_out_of_range_is_refused(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        Plan(**options)


def test_the_plan_measures_what_was_asked_for() -> None:
    plan = Plan()
    cases = plan.serving("Qwen3-30B-A3B").cases(QWEN)
    assert [(case.kind, case.size) for case in cases] == [
        *(("prefill", tokens) for tokens in (512, 4096)),
        *(("decode", streams) for streams in (1, 4, 8, 16)),
    ]
    assert not any(case.adapters for case in cases)
    assert plan.training("Qwen3-30B-A3B").step_tokens == 4096


# Models


def test_published_shapes_are_made_with_random_weights() -> None:
    names = [shape(name, None) for name in Plan().models]
    assert [preset.name for preset in names] == ["Qwen3-30B-A3B", "DeepSeek-V2-Lite"]
    assert all(preset.is_made for preset in names)
    assert [round(checkpoint_bytes(preset) / 1e9) for preset in names] == [61, 31]
    assert names[0].config["num_hidden_layers"] == 48 and shape("qwen3-30b-a3b", 2).config["num_hidden_layers"] == 2


def test_layers_that_do_not_exist_or_have_no_experts_are_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"--layers is 49; Qwen3-30B-A3B has 48"):
        shape("qwen3-30b-a3b", 49)
    with pytest.raises(InvalidValueError, match=r"--layers is 1, too few for DeepSeek-V2-Lite: .*routed experts"):
        shape("deepseek-v2-lite", 1)
    with pytest.raises(UnknownNameError, match="qwen3-30b-a4b"):
        shape("qwen3-30b-a4b", None)


def test_a_checkpoint_is_made_with_the_asked_layers_and_progress(tmp_path: Path) -> None:
    said: list[str] = []
    preset = shape("tiny-qwen3-moe", 2)
    made = make(preset, tmp_path / "model", said.append)
    config = json.loads((made / "config.json").read_text())
    assert config["num_hidden_layers"] == 2
    files = sum(path.stat().st_size for path in made.glob("*.safetensors"))
    assert checkpoint_bytes(preset) <= files < 1.1 * checkpoint_bytes(preset)
    assert said[-1].startswith("tiny-qwen3-moe: 100 % of") and len(said) <= 10


def test_a_disk_that_is_too_small_is_refused_with_the_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 40 * 10**9})
    monkeypatch.setattr("kt_runtime.bench.gpu.models.shutil.disk_usage", lambda _: usage)
    presets = [shape(name, None) for name in Plan().models]
    check_disk(presets[1:], tmp_path, with_gguf=False)
    with pytest.raises(InvalidValueError, match=r"37\.3 GiB free, the files of Qwen3-30B-A3B need 56\.9 GiB"):
        check_disk(presets, tmp_path, with_gguf=False)
    with pytest.raises(InvalidValueError, match="the files of DeepSeek-V2-Lite need"):
        check_disk(presets[1:], tmp_path, with_gguf=True)


# Servers


def test_hot_and_paged_experts_get_equal_device_memory() -> None:
    counts = resident_counts(WORK, Plan().resident_shares)
    assert counts == [16, 32, 64]
    assert resident_counts(WORK, [0.001, 0.01]) == [8], "a token takes eight"
    hot, paged = kt_settings(WORK, counts)[4:], sglang_settings(counts)
    assert [one.resident for one in hot] == [one.resident for one in paged] == counts
    one_expert = 3 * 2048 * 768 * 2
    assert hot[0].options[:2] == ("--gpu-experts", str((16 * 48 + 2) * one_expert)), "and two buffers on the host"
    assert resident_bytes(WORK, 16) == 16 * 48 * one_expert
    assert paged[0].options[:3] == ("--enable-paged-experts", "--paged-experts-num-resident", "16")


def test_the_first_setting_has_the_experts_on_the_cpu_and_every_case() -> None:
    first = kt_settings(WORK, [])[0]
    assert first.kinds == ("prefill", "decode", "training") and first.resident == 0
    assert first.options == ("--gpu-experts", "0", "--stream-experts", "off")


def test_every_option_of_a_setting_is_one_of_kt_runtime_serve_s() -> None:
    """And of its values none is refused before the model and the machine are known."""
    known = {name for parameter in serve_command.params for name in parameter.opts}
    for setting in kt_settings(WORK, [16]):
        assert {option for option in setting.options if option.startswith("--")} <= known, setting.name
        given = dict(zip(setting.options, setting.options[1:], strict=False))
        ServeOptions(model="m", stream_experts=given["--stream-experts"])


def test_every_option_of_stock_sglang_is_one_of_its_own() -> None:
    options = [*sglang_settings([16])[0].options, *stock_arguments(["--dtype", "bfloat16", "--context-tokens", "64"])]
    assert {option[2:] for option in options if option.startswith("--")} <= {name.lstrip("-") for name in NAMES}


def test_a_prompt_below_the_measured_threshold_is_computed_by_the_cpu() -> None:
    streamed = ExpertPlace("streamed")
    status = {"expert_streaming": {"threshold_tokens": 1000}}
    assert place_in(streamed, Case(PREFILL, 512), status).experts == "cpu"
    assert place_in(streamed, Case(PREFILL, 4096), status).experts == "streamed"
    assert place_in(streamed, Case(PREFILL, 4096), {"expert_streaming": {"threshold_tokens": None}}).experts == "cpu"
    assert place_in(streamed, Case(PREFILL, 512), {}) == streamed, "the server has not said"
    assert threshold_of({}) is None and threshold_of(status) == 1000


def test_stock_sglang_loads_every_plugin_but_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def entries(*names: str) -> Any:
        return lambda group: [type("Entry", (), {"name": name}) for name in names]

    monkeypatch.setattr("kt_runtime.bench.gpu.stock.entry_points", entries("kt_runtime"))
    assert stock_environment({"A": "b", "SGLANG_PLATFORM": "kt_runtime"}) == {
        "A": "b",
        "SGLANG_PLUGINS": NO_PLUGIN,
        "PYTHONSAFEPATH": "1",
    }
    monkeypatch.setattr("kt_runtime.bench.gpu.stock.entry_points", entries("kt_runtime", "other"))
    assert stock_environment({})["SGLANG_PLUGINS"] == "other"


@pytest.mark.parametrize("group", GROUPS)
def test_sglang_s_own_loader_finds_no_plugin_of_ours_in_that_environment(group: str) -> None:
    from sglang.srt.plugins import load_plugins_by_group

    assert "kt_runtime" in load_plugins_by_group(group)
    with patch.dict(os.environ, stock_environment(os.environ), clear=True):
        assert "kt_runtime" not in load_plugins_by_group(group)


def test_stock_sglang_gets_the_same_sizes_and_none_of_our_options() -> None:
    given = ["--dtype", "bfloat16", "--context-tokens", "4112", "--max-total-tokens", "5000"]
    given += ["--max-running-requests", "16", "--max-lora-rank", "16", "--lora-slots", "2", "--max-sessions", "1"]
    assert stock_arguments(given) == [
        *("--dtype", "bfloat16", "--context-length", "4112"),
        *("--max-total-tokens", "5000", "--max-running-requests", "16"),
    ]


def test_a_peer_computes_on_the_device_what_fits() -> None:
    config = {"num_hidden_layers": 47}
    assert peer_place(config, 10 * GIB, None, 0) == ON_CPU
    assert peer_place(config, 10 * GIB, "gpu", 10 * GIB + BESIDES_BYTES) == PeerPlace("gpu", 48)
    assert peer_place(config, 48 * GIB, "gpu", 12 * GIB + BESIDES_BYTES) == PeerPlace("cpu", 12)
    assert peer_place(config, 48 * GIB, "gpu", GIB) == PeerPlace("cpu", 0)


# Limits, needs, shares


@pytest.mark.slow
def test_limits_are_measured_by_the_same_code_on_host_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor's own rates are tested with its kernels (bench/experts/test_limits.py)."""
    monkeypatch.setattr(limits, "measure_limits", lambda *given: Limits("x", 1, 2e9, 3e9, 4e9))
    found = measure_gpu_limits(torch.device("cpu"), Sizes(1 << 20, 1 << 20, side=64, calls=2))
    rates = [getattr(found, name) for name in LIMITS.__dataclass_fields__]
    assert all(rate > 1e6 for rate in rates), found
    assert found.or_better(LIMITS).to_host == max(found.to_host, LIMITS.to_host)


def test_a_share_is_the_time_at_the_limit_over_the_measured_time() -> None:
    needs = Needs(dram=0.5 * LIMITS.dram, to_device=0.25 * LIMITS.to_device)
    assert needs.shares(LIMITS, 2.0) == same({"dram": 0.25, "to_device": 0.125})


def test_experts_on_the_cpu_are_read_from_its_memory_and_hot_ones_are_not() -> None:
    cpu = decode_needs(WORK, ExpertPlace("cpu"), 1, 100)
    assert cpu.dram == same(48 * 8 * WORK.expert_bytes) and cpu.to_device == 0
    dense = (WORK.dense_parameters + WORK.head_parameters) * 2 + 100 * WORK.kv_token_bytes
    assert cpu.device_memory == same(dense)
    assert cpu.cpu_arithmetic == same(2.0 * 48 * 8 * WORK.expert_parameters)
    quarter = decode_needs(WORK, ExpertPlace("cpu", 32), 1, 100)
    assert quarter.dram == same(0.75 * cpu.dram) and quarter.cpu_arithmetic == same(0.75 * cpu.cpu_arithmetic)
    assert quarter.device_memory == same(dense + 0.25 * 48 * 8 * 2 * WORK.expert_parameters)
    assert decode_needs(WORK, ExpertPlace("device"), 1, 100).dram == 0


def test_hits_that_the_server_counted_replace_those_of_random_routing() -> None:
    assert hit_rate_of({}) is None and hit_rate_of({"gpu_experts": None}) is None
    assert hit_rate_of({"gpu_experts": {"hits": 0, "misses": 0, "hit_rate": 0.0}}) is None
    counted = hit_rate_of({"gpu_experts": {"hits": 6, "misses": 2, "hit_rate": 0.75}})
    cold, hot = (decode_needs(WORK, ExpertPlace("cpu", 32, rate), 1, 100) for rate in (0.0, counted))
    assert hot.dram == same(0.25 * cold.dram)


def test_streamed_experts_cross_the_bus_once_a_prompt_and_twice_a_training_step() -> None:
    every = 48 * 128 * 2 * WORK.expert_parameters
    prompt = prefill_needs(WORK, ExpertPlace("streamed"), 4096)
    assert prompt.to_device == same(every) and prompt.cpu_arithmetic == 0
    assert prompt.device_arithmetic > 2.0 * 4096 * 48 * 8 * WORK.expert_parameters
    step = training_needs(WORK, ExpertPlace("streamed"), 8, 512)
    assert step.to_device == same(2 * every)
    paged = prefill_needs(WORK, ExpertPlace("paged", 64), 4096)
    assert paged.to_device == same(every / 2) and paged.dram == 0


def test_a_row_has_median_and_slowest_run_with_shares_of_both() -> None:
    row = Row("m", "kt-runtime", "s", "decode", 4, [10.0, 40.0, 20.0], Needs(dram=LIMITS.dram / 20)).as_json(LIMITS)
    assert (row["tokens_per_s"], row["tokens_per_s_least"], row["streams"]) == (20.0, 10.0, 4)
    assert row["shares"] == same({"dram": 0.25}) and row["shares_least"] == same({"dram": 0.125})
    assert (row["limit"], row["limit_share"]) == ("dram", same(0.25))


def test_a_row_that_was_not_measured_says_why_and_has_no_figure() -> None:
    row = Row("m", "sglang_paged", "s", "prefill", 512, needs=Needs(dram=1.0), problem="out of memory").as_json(LIMITS)
    assert row["tokens"] == 512 and row["tokens_per_s"] is None and row["shares"] == {} and row["limit"] is None
    assert row["problem"] == "out of memory"


# Bars, report and page


def test_bars_are_the_worst_of_their_rows_and_missing_rows_leave_them_open() -> None:
    made = report()
    found = {bar.what: bar for bar in bars("Qwen3-30B-A3B", made["rows"])}
    assert found["decode / SGLang's paged experts at equal device memory"].value == same(0.5)
    assert found["decode, experts on the CPU: share of the DRAM limit"].value == same(0.7)
    assert found["prefill of 4096 tokens: streamed / CPU"].value == same(4.0)
    assert found["training: streamed / CPU"].value is None
    assert [bar.as_json()["is_met"] for bar in found.values()] == [False, True, True, True, None]


def test_people_get_a_table_for_each_model_limits_problems_and_bars(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report())
    printed = " ".join(capsys.readouterr().out.split())
    for text in (
        *("Qwen3-30B-A3B", "experts on the CPU", "decode, 1 streams", "0.70 dram", "host to device 20.0 GB/s"),
        *("training, 4096 tokens: the GPU has gone", "0.50, at least 1: NOT met", "at least 3: not measured"),
    ):
        assert text in printed, text


def test_a_report_becomes_a_measurement_whose_misses_are_the_bars_not_met(tmp_path: Path) -> None:
    path, directory = tmp_path / "report.json", tmp_path / "measurements"
    path.write_text(json.dumps(report()))
    directory.mkdir()
    origin: dict[str, str | None] = dict.fromkeys(("title", "machine", "hardware", "ran", "commit"), "x")
    record_report(path, directory, "one", origin | {"date": "2026-01-31"})
    made: Measurement = read_all(directory)["one"]
    assert made.kind == "gpu" and len(made.tables[0].rows) == len(report()["rows"])
    assert made.tables[0].rows[0].figures[:2] == [Decimal(100), Range(Decimal(90), Decimal(110))]
    assert made.misses == [
        "Qwen3-30B-A3B: decode / SGLang's paged experts at equal device memory: 0.5000, at least 1.0 is wanted."
    ]
    assert made.tables[0].rows[-1].note == "the GPU has gone"


def test_a_report_without_a_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({name: value for name, value in report().items() if name != "peers"}))
    origin: dict[str, str | None] = dict.fromkeys(("title", "machine", "hardware", "ran", "commit"), "x")
    with pytest.raises(InvalidValueError, match="report of `bench gpu`: lacks the field 'peers'"):
        record_report(path, tmp_path, "one", origin | {"date": "2026-01-31"})
