"""What a server says of its prefix cache: responses, `/metrics`, `/kt/status` and `kt-runtime cache`."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from reference.server.command_line import run_command

from kt_runtime.cache.format import FILE_HEADER_BYTES, slot_bytes_for
from kt_runtime.sglang_patch.cache.metrics import DISK_NAME
from kt_runtime.sglang_patch.cache.prometheus import COPIED, DISK, EVERY_TIER, LEVELS

PROMPT_TOKENS, PAGE_TOKENS, PAGES = 200, 16, 12  # the last 8 tokens are no whole page


@pytest.fixture(scope="module")
def served(cached_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    place = tmp_path_factory.mktemp("counted")
    with cached_server("tiny-qwen3-moe", place, page_tokens=PAGE_TOKENS, disk="3MiB") as started:
        yield started


def prompt(seed: int) -> list[int]:
    return [3 + (seed * 7919 + position * (13 + seed)) % 600 for position in range(PROMPT_TOKENS)]


def tiers(server: Any) -> dict[str, dict[str, Any]]:
    return {tier["tier"]: tier for tier in server.api.get("/kt/status")["cache"]}


def metrics(server: Any) -> dict[str, float]:
    text = httpx.get(f"{server.api.url}/metrics", timeout=60).raise_for_status().text
    found = [line.split() for line in text.splitlines() if line.startswith("kt_runtime:cache_")]
    return {name.removeprefix("kt_runtime:cache_"): float(value) for name, value in found}


def eventually(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Metrics are published once a second."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def details(server: Any, tokens: list[int]) -> dict[str, Any]:
    body = {"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": 2}}
    found: dict[str, Any] = server.api.post("/generate", body)["meta_info"]["cached_tokens_details"]
    return found


def ask_and_write(server: Any, tokens: list[int]) -> None:
    """A prompt of which no tier has anything; returns when its pages are on the disk."""
    before = tiers(server)["disk"]["counters"]["records_written"]
    assert details(server, tokens)["computed"] == PROMPT_TOKENS
    eventually(lambda: tiers(server)["disk"]["counters"]["records_written"] >= before + PAGES)


def grown(before: dict[str, Any], after: dict[str, Any], *names: str) -> tuple[int, ...]:
    return tuple(after[name] - before[name] for name in names)


def kt_runtime(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("cache", *arguments, directory=Path.cwd(), environment={"COLUMNS": "160"})


def test_a_response_says_which_tier_had_its_prompt_and_each_tier_counts(served: Any) -> None:
    asked = prompt(1)
    cached, rest = PAGES * PAGE_TOKENS, PROMPT_TOKENS - PAGES * PAGE_TOKENS
    nothing = {"device": 0, "host": 0, "storage": 0, "storage_backend": DISK_NAME, "computed": PROMPT_TOKENS}

    before = tiers(served)
    assert details(served, asked) == nothing
    cold = tiers(served)
    for tier in ("device", "host", "disk"):
        assert grown(before[tier], cold[tier], "hits", "misses") == (0, PAGES), tier

    assert details(served, asked) == {**nothing, "device": cached, "computed": rest}
    warm = tiers(served)
    assert grown(cold["device"], warm["device"], "hits", "misses") == (PAGES, 0)
    assert grown(cold["host"], warm["host"], "hits", "misses") == (0, 0)
    page_bytes = warm["device"]["page_bytes"]
    assert {tier["page_bytes"] for tier in warm.values()} == {page_bytes}
    assert warm["device"]["capacity_bytes"] == served.device_tokens // PAGE_TOKENS * page_bytes
    eventually(lambda: tiers(served)["host"]["bytes_written"] >= PAGES * page_bytes)
    eventually(lambda: tiers(served)["disk"]["counters"]["records_written"] == PAGES)

    served.flush_device()
    flushed = tiers(served)
    assert grown(warm["device"], flushed["device"], "evictions")[0] >= PAGES
    assert details(served, asked) == {**nothing, "host": cached, "computed": rest}
    from_host = tiers(served)
    assert grown(flushed["device"], from_host["device"], "hits", "misses") == (0, PAGES)
    assert grown(flushed["host"], from_host["host"], "hits", "misses") == (PAGES, 0)
    assert grown(flushed["host"], from_host["host"], "bytes_read") == (PAGES * page_bytes,)
    assert grown(flushed["disk"], from_host["disk"], "hits", "misses") == (0, 0)

    served.flush_memory()
    emptied = tiers(served)
    assert emptied["device"]["pages"] == emptied["host"]["pages"] == 0
    assert details(served, asked) == {**nothing, "storage": cached, "computed": rest}
    from_disk = tiers(served)
    assert grown(emptied["host"], from_disk["host"], "hits", "misses") == (0, PAGES)
    assert grown(emptied["disk"], from_disk["disk"], "hits", "misses", "bytes_read") == (PAGES, 0, PAGES * page_bytes)


def test_openais_usage_says_how_much_was_cached(served: Any) -> None:
    body = {"model": served.api.get("/v1/models")["data"][0]["id"], "prompt": prompt(2), "max_tokens": 2}
    served.api.post("/v1/completions", body)
    answer = served.api.post("/v1/completions", {**body, "return_cached_tokens_details": True})
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": PAGES * PAGE_TOKENS}
    assert answer["sglext"]["cached_tokens_details"] == {
        "device": PAGES * PAGE_TOKENS,
        "host": 0,
        "storage": 0,
        "storage_backend": DISK_NAME,
    }


def test_damaged_records_are_counted_and_are_misses(served: Any) -> None:
    asked = prompt(3)
    ask_and_write(served, asked)
    served.flush_memory()
    before = tiers(served)["disk"]
    slot_bytes = slot_bytes_for(before["page_bytes"])
    for segment in (served.cache_directory / "segments").iterdir():
        damage_every_slot(segment, slot_bytes)
    assert details(served, asked)["computed"] == PROMPT_TOKENS
    after = tiers(served)["disk"]
    corrupt, misses = grown(before, after, "corrupt", "misses")
    assert 1 <= corrupt <= misses
    eventually(lambda: metrics(served)["disk_corrupt_total"] == tiers(served)["disk"]["corrupt"])
    assert list((served.cache_directory / "quarantine").iterdir())
    served.api.post("/kt/cache/clear", {})  # what is left of it is damaged, too


def damage_every_slot(segment: Path, slot_bytes: int) -> None:
    with segment.open("r+b") as file:
        for offset in range(FILE_HEADER_BYTES, segment.stat().st_size, slot_bytes):
            file.seek(offset + slot_bytes // 2)
            old = file.read(1)
            file.seek(offset + slot_bytes // 2)
            file.write(bytes([old[0] ^ 255]))


def test_metrics_say_of_every_tier_what_the_status_says(served: Any) -> None:
    for _ in range(3):
        served.evict_from_memory()
    eventually(lambda: all(tier["evictions"] > 0 for tier in tiers(served).values()))

    def agree() -> bool:
        found = metrics(served)
        expected: dict[str, float] = {}
        for name, tier in tiers(served).items():
            counted = [*EVERY_TIER, *(COPIED if name != "device" else ()), *(DISK if name == "disk" else ())]
            values = tier["counters"] | tier
            expected |= {f"{name}_{what}_total": values[what] for what in counted}
            expected |= {f"{name}_{what}": values[what] for what in LEVELS}
        assert found.keys() >= expected.keys()
        return expected.items() <= found.items() and found["disk_writable"] == found["disk_readable"] == 1

    eventually(agree)
    assert tiers(served)["disk"]["used_bytes"] <= 3 << 20
    text = httpx.get(f"{served.api.url}/metrics").text
    assert "sglang:num_requests_total" in text and "# HELP kt_runtime:cache_disk_hits_total Prefix cache, disk:" in text


def test_the_command_shows_and_empties_a_running_server(served: Any) -> None:
    ask_and_write(served, prompt(4))
    shown = json.loads(kt_runtime("stat", "--url", served.api.url, "--json").stdout)["tiers"]
    assert [tier["tier"] for tier in shown] == ["device", "host", "disk"]
    assert shown[2]["directory"] == str(served.cache_directory)
    assert str(served.cache_directory) in kt_runtime("stat", "--url", served.api.url).stdout

    directory = json.loads(kt_runtime("stat", "--dir", str(served.cache_directory), "--json").stdout)
    assert directory["records"] > 0 and directory["holder"] is not None
    refused = kt_runtime("verify", "--dir", str(served.cache_directory))
    assert refused.returncode == 2 and "in use by process" in refused.stderr

    cleared = json.loads(kt_runtime("clear", "--url", served.api.url, "--json").stdout)["cleared"]
    assert set(cleared) == {"device", "host", "disk"} and cleared["disk"] > 0
    assert {name: tier["pages"] for name, tier in tiers(served).items()} == {"device": 0, "host": 0, "disk": 0}
    assert details(served, prompt(4))["computed"] == PROMPT_TOKENS
    eventually(lambda: tiers(served)["disk"]["pages"] == PAGES)  # written again


def test_a_server_without_tiers_counts_its_device(float32_server: Any) -> None:
    before = tiers(float32_server)["device"]
    assert set(tiers(float32_server)) == {"device"} and before["page_tokens"] == 8
    asked = prompt(5)
    assert details(float32_server, asked) == {"device": 0, "host": 0, "computed": PROMPT_TOKENS}
    assert details(float32_server, asked) == {"device": 192, "host": 0, "computed": 8}
    after = tiers(float32_server)["device"]
    assert grown(before, after, "hits", "misses") == (24, 24)
    eventually(lambda: metrics(float32_server).get("device_hits_total") == after["hits"])
    assert not [name for name in metrics(float32_server) if not name.startswith("device_")]
    assert kt_runtime("clear", "--url", float32_server.api.url).returncode == 0
    assert tiers(float32_server)["device"]["pages"] == 0
