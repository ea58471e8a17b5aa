"""The prefix cache's part of what is checked and set up before a model is loaded."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from reference.server.serve_options import options

from kt_runtime.cli.serve import command
from kt_runtime.errors import ConflictError, InvalidValueError, NotFoundError
from kt_runtime.serve import launch
from kt_runtime.serve.options.named import ServeOptions

MIB = 1 << 20
TIERS: dict[str, Any] = {"max_total_tokens": 1024, "cache_host_bytes": 3 * MIB, "cache_disk_bytes": 8 * MIB}


def test_without_cache_options_nothing_of_the_tiers_is_set_up(
    started: list[Any], model: Path, port: int, private_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(private_directory))
    launch.serve(options(model, port, private_directory), print)
    (call,) = started
    assert "--enable-hierarchical-cache" not in call.arguments and "--page-size" not in call.arguments
    assert (call.settings.cache_directory, call.settings.cache_disk_bytes) == (None, 0)
    assert not (private_directory / "kt-runtime" / "prefix").exists()


def test_tiers_reach_sglang_and_the_process_that_holds_the_disk_tier(
    started: list[Any], model: Path, port: int, private_directory: Path
) -> None:
    asked = options(model, port, private_directory, cache_dir=private_directory / "cache", **TIERS)
    launch.serve(dataclasses.replace(asked, passed_on=("--chunked-prefill-size", "128")), print)
    (call,) = started
    values = dict(zip(call.arguments, call.arguments[1:], strict=False))
    assert "--enable-hierarchical-cache" in call.arguments
    assert (values["--max-total-tokens"], values["--page-size"]) == ("1024", "64")
    settings = call.settings
    assert settings.cache_directory == str(private_directory / "cache") and Path(settings.cache_directory).is_dir()
    assert (settings.cache_disk_bytes, settings.cache_page_tokens, settings.cache_read_only) == (8 * MIB, 64, False)


def test_device_tier_given_in_bytes_says_how_many_tokens_there_are(
    started: list[Any], model: Path, port: int, private_directory: Path
) -> None:
    launch.serve(options(model, port, private_directory, cache_device_bytes=3 * MIB), print)
    (call,) = started
    values = dict(zip(call.arguments, call.arguments[1:], strict=False))
    assert values["--max-total-tokens"] == str(3 * MIB // 768)


def test_default_cache_directory_is_the_users_and_the_models(
    started: list[Any], model: Path, port: int, private_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(private_directory))
    launch.serve(options(model, port, private_directory, cache_disk_bytes=64 * MIB), print)
    directory = Path(started[0].settings.cache_directory)
    assert directory.parent == private_directory / "kt-runtime" / "prefix"
    assert directory.name.startswith(f"{model.name}-")


def test_cache_directory_of_a_running_server_is_refused_before_anything_starts(
    started: list[Any], model: Path, port: int, private_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kt_runtime.cache.page_store import PageStore
    from kt_runtime.sglang_patch.frontend import http_server as frontend

    asked = options(model, port, private_directory, cache_dir=private_directory / "cache", **TIERS)
    store = PageStore(private_directory / "cache", 4 * MIB, bytes(16))
    with pytest.raises(ConflictError, match=rf"--cache-dir .*in use by process {os.getpid()}.*--cache-read-only"):
        launch.serve(asked, print)
    assert not started
    launch.serve(dataclasses.replace(asked, cache_read_only=True), print)
    assert started.pop().settings.cache_read_only
    store.close()
    # A server that is still loading its model has not opened the directory yet.
    other = options(model, port - 1, private_directory, cache_dir=private_directory / "cache", **TIERS)
    monkeypatch.setattr(frontend, "run", lambda *_: launch.serve(other, print))
    with pytest.raises(ConflictError, match=f"--cache-dir .* is in use by process {os.getpid()}"):
        launch.serve(asked, print)


def test_what_is_wrong_with_the_cache_is_refused_before_a_directory_is_made(
    started: list[Any], model: Path, port: int, private_directory: Path
) -> None:
    place = private_directory / "cache"
    for values, message in (
        ({"cache_disk_bytes": MIB // 2}, "--cache-disk 512 KiB: at least 1 MiB"),
        ({"cache_disk_bytes": 8 * MIB, "cache_host_bytes": 1 << 60}, "does not fit.*lower .*--cache-host"),
        ({"cache_device_bytes": 1 << 60, "cache_disk_bytes": MIB}, "does not fit.*lower .*--cache-device"),
        ({"cache_disk_bytes": MIB, "passed_on": ("--chunked-prefill-size", "100")}, "multiple of --cache-page-tokens"),
        ({"cache_disk_bytes": MIB, "passed_on": ("--page-size", "8")}, "--page-size can't be .*--cache-page-tokens"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            launch.serve(options(model, port, private_directory, cache_dir=place, **values), print)
    assert not started and not place.exists()


def test_a_host_tier_with_little_room_is_said(
    started: list[Any], model: Path, port: int, private_directory: Path
) -> None:
    lines: list[str] = []
    sizes = {**TIERS, "cache_host_bytes": 1280 * 768}
    launch.serve(options(model, port, private_directory, cache_dir=private_directory / "c", **sizes), lines.append)
    assert started and "device 1024 tokens (768 KiB), host 1280 tokens (960 KiB), disk 8 MiB in" in lines[0]
    assert "256 tokens more than the device tier" in lines[1]


def test_preset_that_is_not_here_is_refused_with_the_memory_that_its_tiers_would_need(
    started: list[Any], port: int, private_directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    given = options(tmp_path, port, private_directory)
    asked = dataclasses.replace(given, model="Qwen3-30B-A3B", max_lora_rank=16)
    for host_bytes, need in (
        (None, r"it needs 89\.6 GiB on the CPU"),
        (1 << 42, r"it needs 4\.09 TiB on the CPU"),
    ):
        with pytest.raises(NotFoundError, match=need):
            launch.serve(dataclasses.replace(asked, cache_host_bytes=host_bytes), print)
    assert not started and not list(private_directory.iterdir())


def test_command_line_gives_sizes_in_bytes_and_leaves_out_what_was_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServeOptions] = []
    monkeypatch.setattr(launch, "serve", lambda asked, say: seen.append(asked))
    sizes = [
        "--gpu-experts",
        "2GiB",
        "--routing-replay",
        "256MiB",
        "--cache-device",
        "1GiB",
        "--cache-host",
        "4G",
        "--cache-disk",
        "1.5TiB",
        "--cache-dir",
        "/c",
    ]
    for arguments in ([], sizes, ["--max-total-tokens", "512", "--cache-host", "0"]):
        result = CliRunner().invoke(command, ["--model", "m", *arguments], catch_exceptions=False)
        assert result.exit_code == 0
    plain, tiers, tokens = seen
    assert plain == ServeOptions(model="m", lora_rank_may_be_lower=True)
    assert (tiers.cache_device_bytes, tiers.cache_host_bytes, tiers.cache_disk_bytes) == (1 << 30, 4 << 30, 3 << 39)
    assert (tiers.gpu_experts_bytes, plain.gpu_experts_bytes) == (2 << 30, 0)
    assert (tiers.routing_replay_bytes, plain.routing_replay_bytes) == (256 << 20, 0)
    assert tiers.cache_dir == Path("/c") and tiers.max_total_tokens == 16384
    assert (tokens.max_total_tokens, tokens.cache_host_bytes, tokens.asks_for_cache) == (512, 0, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache-device", "1G", "--max-total-tokens", "16384"], "both set the size of the KV cache"),
        (["--lora-memory", "1G", "--lora-slots", "4"], "both bound the adapters in batches"),
        (["--cache-disk", "20GB"], "--cache-disk '20GB': unknown unit 'GB'; did you mean 'GiB'"),
    ],
)
def test_command_line_refuses_sizes_that_contradict_or_are_none(arguments: list[str], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        CliRunner().invoke(command, ["--model", "m", *arguments], catch_exceptions=False, standalone_mode=False)
