"""What is checked before a model is loaded. The server itself: tests/system/serving/test_http.py."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from reference.checkpoints.quantized_checkpoint import quantize_checkpoint
from reference.server.serve_options import options

from kt_runtime.cli.serve import command
from kt_runtime.errors import ConflictError, InvalidValueError, KtError, NotFoundError, UnknownNameError
from kt_runtime.families import family_for
from kt_runtime.families.base import Family
from kt_runtime.resident.config import ResidentSettings
from kt_runtime.serve import exactness, launch
from kt_runtime.serve.memory import server as server_memory
from kt_runtime.serve.memory.server import plan_server
from kt_runtime.serve.options.named import ServeOptions, check_port_is_free

KEY = "correct-horse-battery"


def test_server_is_started_with_settings_that_the_resident_can_read(
    started: list[Any], model: Path, port: int, private_directory: Path
) -> None:
    asked = options(model, port, private_directory, train_share=0.25, passed_on=("--log-level", "error"))
    launch.serve(asked, print)
    (call,) = started
    assert call.settings.model_directory == str(model) and call.settings.train_share == 0.25
    assert call.settings.wire_address == f"ipc://{private_directory}/resident-{port}.sock"
    assert call.settings.names_address == f"ipc://{private_directory}/names-{port}.sock"
    assert Path(call.settings.adapter_directory).is_dir()
    assert call.arguments[-2:] == ["--log-level", "error"] and "--enable-lora" in call.arguments
    scratch = private_directory / f"sglang-{port}"
    assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
    call.frontend.clean_up()
    assert not scratch.exists() and not list(private_directory.glob("*.sock"))


def test_expert_format_is_asked_of_the_resident_and_is_refused_for_integer_checkpoints(
    started: list[Any], model: Path, port: int, private_directory: Path, tmp_path: Path
) -> None:
    launch.serve(options(model, port, private_directory, expert_format="int4"), print)
    (call,) = started
    assert call.settings.expert_format == "int4"
    quantized, _ = quantize_checkpoint(model, tmp_path, "int4_g32")
    with pytest.raises(InvalidValueError, match=r"--expert-format int8: this checkpoint's experts are quantized"):
        launch.serve(options(quantized, port, private_directory, expert_format="int8"), print)
    assert len(started) == 1
    with pytest.raises(UnknownNameError, match=r"unknown expert format 'fp4'; known: int4, int8"):
        options(model, port, private_directory, expert_format="fp4")


def test_the_native_step_is_turned_off_by_an_option(
    started: list[Any], model: Path, port: int, private_directory: Path
) -> None:
    for no_step in (False, True):
        launch.serve(options(model, port, private_directory, no_step=no_step), print)
        assert started[-1].settings.step is not no_step


def test_exact_is_refused_before_anything_starts_where_it_can_not_hold(
    started: list[Any], model: Path, port: int, private_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = options(model, port, private_directory, exact=True)
    monkeypatch.setattr(exactness, "has_gpu", lambda: False)
    with pytest.raises(InvalidValueError, match="--exact and --no-step exclude each other: leave out one of them"):
        launch.serve(dataclasses.replace(asked, no_step=True), print)
    differ = "--exact: training's log-probabilities may differ from served ones: "
    with monkeypatch.context() as patch, pytest.raises(InvalidValueError, match=f"{differ}this machine has a GPU"):
        patch.setattr(exactness, "has_gpu", lambda: True)
        launch.serve(asked, print)
    family = family_for(json.loads((model / "config.json").read_text()))
    with monkeypatch.context() as patch, pytest.raises(InvalidValueError, match=f"{differ}the family .* has no table"):
        patch.setattr(type(family), "decoder_stack", Family.decoder_stack)
        launch.serve(asked, print)
    assert not started
    launch.serve(asked, print)
    assert len(started) == 1


def test_the_cpu_is_taken_where_it_is_named_and_hides_gpus_from_all_processes(
    started: list[Any], model: Path, port: int, private_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "KT_RUNTIME_DEVICE"):
        monkeypatch.setenv(name, "0")  # so that both are restored
    lines: list[str] = []
    launch.serve(options(model, port, private_directory, device="cpu"), lines.append)
    (call,) = started
    assert call.environ["CUDA_VISIBLE_DEVICES"] == "" and call.environ["KT_RUNTIME_DEVICE"] == "cpu"
    assert call.arguments[call.arguments.index("--device") + 1] == "cpu"
    assert lines[0] == "device: the CPU, as --device says"


@pytest.mark.parametrize("device", ["cuda:7", "gpu", "cudda"])
def test_a_device_that_is_not_there_is_refused_before_anything_starts(
    started: list[Any], model: Path, port: int, private_directory: Path, device: str
) -> None:
    with pytest.raises((UnknownNameError, InvalidValueError), match="--device") as refused:
        launch.serve(options(model, port, private_directory, device=device), print)
    assert refused.value.exit_status == 2 and not started and not list(private_directory.iterdir())


def test_training_is_cut_into_smaller_microbatches_where_memory_is_short(
    started: list[Any], model: Path, port: int, private_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = options(model, port, private_directory, microbatch_tokens=4096, max_lora_rank=8)
    config = json.loads((model / "config.json").read_text())
    least = plan_server(dataclasses.replace(asked, microbatch_tokens=512), config, "m")[0].total_bytes("cpu")
    monkeypatch.setattr(server_memory, "available_memory", lambda with_gpu, index=0: {"cpu": least})
    monkeypatch.setattr(server_memory, "has_gpu", lambda: False)
    lines: list[str] = []
    launch.serve(asked, lines.append)
    assert started[0].settings.microbatch_tokens == 512
    assert "training computes 512 tokens at once, not 4096: there is no memory for more (--microbatch-tokens)" in lines


PLACEMENT = """\
- match: {name: "mlp\\\\.experts$"}
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs: {generate_device: cpu, generate_op: KExpertsCPU, out_device: "cuda:1", backend: AMXInt8}
- match: {name: "^lm_head"}
  replace: {class: ktransformers.operators.linear.KTransformersLinear, kwargs: {generate_device: "cuda:0"}}
"""


def test_placement_sets_the_expert_format_and_says_what_it_can_not_do(
    started: list[Any], model: Path, port: int, private_directory: Path, tmp_path: Path
) -> None:
    rules, lines = tmp_path / "rules.yaml", list[str]()
    rules.write_text(PLACEMENT)
    launch.serve(options(model, port, private_directory, placement=rules), lines.append)
    assert started[0].settings.expert_format == "int8"
    assert lines[:2] == [
        f"{rules}: spreads layers over 2 GPUs: kt-runtime serves on one device",
        f"{rules}: places modules on a GPU: this server has none, and all of them are on the CPU",
    ]
    with pytest.raises(InvalidValueError, match=r"--expert-format int4: .*rules.yaml asks for int8 experts"):
        launch.serve(options(model, port, private_directory, placement=rules, expert_format="int4"), print)
    quantized, _ = quantize_checkpoint(model, tmp_path / "int4", "int4_g32")
    with pytest.raises(InvalidValueError, match=r"rules.yaml: asks for int8 experts: .*experts are quantized"):
        launch.serve(options(quantized, port, private_directory, placement=rules), print)
    rules.write_text(PLACEMENT.replace("AMXInt8", "AMXBF16"))
    launch.serve(options(model, port, private_directory, placement=rules), print)
    launch.serve(options(quantized, port, private_directory, placement=rules), lines.append)
    assert [call.settings.expert_format for call in started[1:]] == [None, None]
    assert f"{rules}: asks for bf16 experts: they stay as the checkpoint has them" in lines


def test_hot_experts_reach_the_resident_and_are_refused_without_a_gpu(
    started: list[Any],
    model: Path,
    port: int,
    private_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pins, config = tmp_path / "pins.yaml", json.loads((model / "config.json").read_text())
    layer = family_for(config).moe_layers(config)[0]
    pins.write_text(f"- gpu_experts:\n    {layer}: [0, 2]\n")
    asked = options(model, port, private_directory, placement=pins, gpu_experts_bytes=1 << 20)
    monkeypatch.setattr(launch, "has_gpu", lambda: False)
    with pytest.raises(InvalidValueError, match="--gpu-experts 1 MiB: this server has no GPU"):
        launch.serve(asked, print)
    with pytest.raises(InvalidValueError, match=r"pins\.yaml: gpu_experts needs room on the GPU"):
        launch.serve(dataclasses.replace(asked, gpu_experts_bytes=0), print)
    with pytest.raises(InvalidValueError, match="--exact and --gpu-experts exclude each other"):
        launch.serve(dataclasses.replace(asked, exact=True), print)
    assert not started
    monkeypatch.setattr(launch, "check_gpu_experts", lambda *_, **__: None)
    launch.serve(asked, print)
    settings = started[0].settings
    assert ResidentSettings.from_environment() == settings
    assert (settings.gpu_expert_bytes, settings.pinned_experts) == (1 << 20, {layer: (0, 2)})


@pytest.mark.parametrize(
    ("change", "expected"),
    [(("lm_head", "lm_hea$"), "matches no module of the model"), (("AMXInt8", "AMXInt4"), "unknown backend")],
)
def test_placement_that_is_wrong_for_the_model_is_refused_before_anything_starts(
    started: list[Any], model: Path, port: int, private_directory: Path, change: tuple[str, str], expected: str
) -> None:
    rules = private_directory / "rules.yaml"
    rules.write_text(PLACEMENT.replace(*change))
    result = CliRunner().invoke(
        command, ["--model", str(model), "--port", str(port), "--placement", str(rules)], standalone_mode=False
    )
    assert isinstance(result.exception, InvalidValueError) and expected in str(result.exception)
    assert not started


def test_key_reaches_neither_sglang_nor_its_processes(
    started: list[Any], model: Path, port: int, private_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KT_RUNTIME_API_KEY", KEY)
    monkeypatch.setattr(sys, "argv", ["kt-runtime", "serve", "--api-key", KEY, f"--api-key={KEY}"])
    launch.serve(options(model, port, private_directory, api_key=KEY), print)
    (call,) = started
    assert KEY not in repr((call.arguments, call.environ, call.settings, vars(call.frontend), sys.argv))
    assert call.frontend._door.policy.decide("GET", "/v1/models", []) is not None


def test_front_door_options_reach_it_and_wrong_ones_are_refused_before_anything_starts(
    started: list[Any], model: Path, port: int, private_directory: Path
) -> None:
    fields = {"cors_origins": ("http://localhost:3000",), "max_body_bytes": 2**20, "any_model_name": True}
    launch.serve(options(model, port, private_directory, **fields), print)
    door = started[0].frontend._door
    assert door.policy.origins.allowed == {"http://localhost:3000"} and door.max_body_bytes == 2**20
    assert door.models.any_name and door.models.reserved == {door.models.name, "default"}
    for wrong, message in (({"host": "0.0.0.0"}, "--allow-no-key"), ({"cors_origins": ("*",)}, "--cors-origin")):
        with pytest.raises(InvalidValueError, match=message):
            launch.serve(options(model, port, private_directory, **wrong), print)
    assert len(started) == 1


def test_model_that_does_not_exist_is_refused_before_anything_starts(
    started: list[Any], port: int, private_directory: Path
) -> None:
    with pytest.raises(NotFoundError, match="looked at"):
        launch.serve(options(private_directory / "none", port, private_directory), print)
    assert not started


def test_preset_that_is_not_here_is_refused_with_the_memory_it_would_need(
    started: list[Any], port: int, private_directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    asked = dataclasses.replace(options(tmp_path, port, private_directory), model="DeepSeek-V3-bf16")
    with pytest.raises(NotFoundError, match=r"looked at.*it needs \d\.\d+ TiB on the .PU, where .* are free"):
        launch.serve(asked, print)
    assert not started


def test_model_that_does_not_fit_is_refused_with_the_bytes(
    started: list[Any], model: Path, port: int, private_directory: Path
) -> None:
    asked = options(model, port, private_directory, max_total_tokens=10**12)
    with pytest.raises(InvalidValueError, match=r"does not fit.*--max-total-tokens"):
        launch.serve(asked, print)
    assert not started


def test_second_server_of_a_port_is_refused_by_the_lock(
    started: list[Any], model: Path, port: int, private_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kt_runtime.sglang_patch.frontend import http_server as frontend

    asked = options(model, port, private_directory)
    monkeypatch.setattr(frontend, "run", lambda *_: launch.serve(asked, print))
    with pytest.raises(ConflictError, match=f"in use by process {os.getpid()}"):
        launch.serve(asked, print)


def test_port_in_use_is_refused_and_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        number = other.getsockname()[1]
        with pytest.raises(ConflictError, match=rf"port {number} on 127.0.0.1 is in use.*--port"):
            check_port_is_free("127.0.0.1", number)
    check_port_is_free("127.0.0.1", number)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_host_that_is_not_this_machines_is_refused(host: str, port: int) -> None:
    with pytest.raises(InvalidValueError, match="--host"):
        check_port_is_free(host, port)


def test_runtime_directory_that_others_may_enter_is_refused(
    started: list[Any], model: Path, port: int, private_directory: Path
) -> None:
    (private_directory / "open").mkdir(mode=0o755)
    with pytest.raises(InvalidValueError, match="0700"):
        launch.serve(options(model, port, private_directory / "open"), print)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dtype": "bfloat"}, "did you mean 'bfloat16'"),
        ({"port": 0}, "--port 0"),
        ({"train_share": 0.0}, "--train-share"),
        ({"train_share": float("nan")}, "--train-share"),
        ({"tpot_target_ms": 0.0}, "--tpot-target-ms 0: allowed are"),
        ({"ttft_target_ms": 1e9}, "--ttft-target-ms"),
        ({"max_lora_rank": 0}, "--max-lora-rank 0"),
        ({"lora_slots": 1}, "--lora-slots 1: must be at least 2"),
        ({"expert_threads": -1}, "--expert-threads"),
        ({"max_body_bytes": 5}, "--max-body-size 5: must be at least 1024"),
        ({"cache_page_tokens": 48}, "--cache-page-tokens 48: allowed are 1, 2, 4, .*, 1024"),
        ({"cache_page_tokens": 2048}, "--cache-page-tokens 2048"),
        ({"cache_page_tokens": 0}, "--cache-page-tokens 0: must be at least 1"),
        ({"cache_dir": Path("/c")}, "--cache-dir: there is no disk tier; .*--cache-disk"),
        ({"cache_read_only": True, "cache_host_bytes": 1}, "--cache-read-only: there is no disk tier"),
    ],
)
def test_options_outside_their_range_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        ServeOptions(model="m", **values)


def test_key_is_not_in_the_options_repr() -> None:
    assert KEY not in repr(ServeOptions(model="m", api_key=KEY))


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:30000"), ("0.0.0.0", "http://127.0.0.1:30000"), ("::", "http://[::1]:30000")],
)
def test_url_is_one_that_this_machine_can_reach(host: str, url: str) -> None:
    assert ServeOptions(model="m", host=host).url == url
    encrypted = ServeOptions(model="m", host=host, passed_on=("--ssl-keyfile", "k", "--ssl-certfile=c"))
    assert encrypted.url == url.replace("http://", "https://")


def test_second_server_of_an_adapter_directory_is_refused_before_anything_is_loaded(
    started: list[Any], model: Path, port: int, private_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kt_runtime.sglang_patch.frontend import http_server as frontend

    asked = options(model, port, private_directory)
    other = dataclasses.replace(asked, port=port + 1, runtime_dir=private_directory / "other")
    monkeypatch.setattr(launch, "check_port_is_free", lambda *_: None)
    monkeypatch.setattr(frontend, "run", lambda *_: launch.serve(other, print))
    with pytest.raises(ConflictError, match=rf"--adapter-dir .* is in use by process {os.getpid()}: one server"):
        launch.serve(asked, print)


def test_command_line_passes_what_follows_the_dashes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServeOptions] = []
    monkeypatch.setattr(launch, "serve", lambda asked, say: seen.append(asked))
    result = CliRunner().invoke(
        command,
        ["--model", "tiny-qwen3-moe", "--port", "1234", "--", "--log-level", "error"],
        env={"KT_RUNTIME_API_KEY": KEY},
        catch_exceptions=False,
    )
    assert result.exit_code == 0 and seen[0].passed_on == ("--log-level", "error")
    assert seen[0].port == 1234 and seen[0].api_key == KEY


def test_help_does_not_show_the_key_of_the_environment() -> None:
    assert KEY not in CliRunner().invoke(command, ["--help"], env={"KT_RUNTIME_API_KEY": KEY}).output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model-path", "m", "--log-level", "error", "--port", "1234"],
        ["m", "--port=1234", "--log-level", "error"],
        ["--port", "1234", "--model_path=m", "--", "--log-level", "error"],
    ],
)
def test_options_are_taken_as_peers_users_type_them(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServeOptions] = []
    monkeypatch.setattr(launch, "serve", lambda asked, say: seen.append(asked))
    CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False)
    (asked,) = seen
    assert (asked.model, asked.port, asked.passed_on) == ("m", 1234, ("--log-level", "error"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--prot", "30001"], r"unknown option --prot: .*did you mean --port\b"),
        (["--tool-call-prser", "qwen"], r"unknown option --tool-call-prser: .*did you mean --tool-call-parser"),
        (["--schedule-polcy", "lpm"], r"unknown option --schedule-polcy: .*did you mean --schedule-policy"),
        (["--tool-call-parser", "qwenn"], r"argument --tool-call-parser: invalid choice: 'qwenn'"),
        (["--log-level"], r"argument --log-level: expected one argument"),
        (["--kt-method", "AMXINT4"], r"--kt-method can't be passed on.*--expert-format"),
        (["--tensor-parallel-size", "2"], r"--tensor-parallel-size can't be passed on.*--tp-size"),
        (["--tp-size", "3"], r"--tp-size 3: 4 attention heads can't be split evenly over 3 ranks"),
        (["--served-model-name", "a:b"], r"--served-model-name 'a:b': allowed are letters"),
    ],
)
def test_options_that_mean_nothing_are_refused_before_anything_starts(
    started: list[Any], model: Path, port: int, private_directory: Path, arguments: list[str], expected: str
) -> None:
    given = ["--model", str(model), "--port", str(port), "--runtime-dir", str(private_directory), *arguments]
    result = CliRunner().invoke(
        command, [*given, "--adapter-dir", str(private_directory / "adapters")], standalone_mode=False
    )
    assert isinstance(result.exception, InvalidValueError) and re.search(expected, str(result.exception))
    assert not started and not list(private_directory.glob("*.log"))


@pytest.mark.slow
def test_a_misspelt_option_is_told_before_sglang_is_imported() -> None:
    """That takes seconds."""
    code = (
        "import sys\n"
        "from kt_runtime.cli.main import main\n"
        "for option in sys.argv[1:]:\n"
        "    status = main(['serve', '--model', 'no-such-model', option, '1'])\n"
        "    print(option, status, 'sglang' in sys.modules, 'torch' in sys.modules)"
    )
    misspelt = ["--schedule-polcy", "--prot", "--modle"]
    ran = subprocess.run([sys.executable, "-c", code, *misspelt], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [f"{option} 2 False False" for option in misspelt], ran.stdout
    assert all(f"unknown option {option}" in ran.stderr for option in misspelt), ran.stderr


def test_served_name_and_parsers_reach_sglang(
    started: list[Any], model: Path, port: int, private_directory: Path
) -> None:
    asked = options(model, port, private_directory, served_model_name="org/mine", tool_call_parser="qwen")
    launch.serve(asked, print)
    (call,) = started
    following = dict(zip(call.arguments, call.arguments[1:], strict=False))
    assert (following["--served-model-name"], following["--tool-call-parser"]) == ("org/mine", "qwen")
    assert "--reasoning-parser" not in call.arguments  # the tiny model's template knows no thinking
    assert call.settings.model == "org/mine"


def test_all_errors_here_are_the_users(port: int) -> None:
    with pytest.raises(KtError) as raised:
        ServeOptions(model="m", port=-1)
    assert raised.value.exit_status == 2
