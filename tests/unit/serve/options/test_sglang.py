"""Which of SGLang's options a user may pass on."""

from __future__ import annotations

import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.options.sglang import (
    CHUNK_OPTION,
    HARMLESS,
    REFUSED,
    REFUSED_WITH_TIERS,
    check_chunks,
    check_passed_on,
    reason_against,
)
from kt_runtime.serve.options.sglang_names import NAMES

KEY = "correct-horse-battery"


def test_what_kt_runtime_does_not_decide_may_pass() -> None:
    check_passed_on(["--watchdog-timeout", "-1", "--log-level=error", "--sleep-on-idle"])
    check_passed_on(["--tp-size", "1"])
    check_passed_on(["--tp-size=1"])
    check_passed_on(["--grammar-backend", "none"])
    check_passed_on(["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill=breakable"])
    check_passed_on(["--cuda-graph-bs-decode", "1", "2", "4", "--cuda-graph-max-bs-prefill", "256"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp-size", "2"], "--tp-size can't be passed on.*kt-runtime's own option"),
        (["--log-level", "error", "--pp-size=2"], "--pp-size can't be passed on.*set by --tp-size"),
        (["--api-key", KEY], "SGLang logs its arguments"),
        (["--speculative-algorithm", "EAGLE"], "heads for multi-token prediction .* are read past"),
        (["--speculative-algorithm=NEXTN"], "--speculative-algorithm can't be passed on .*no draft model is loaded"),
        (["--speculative-draft-model-path", "m"], "no draft model is loaded"),
        (["--enable-multimodal"], "--enable-multimodal can't be passed on .*a vision tower is read past"),
        (["--mm-attention-backend", "sdpa"], "served as text models"),
        (["--limit-mm-data-per-request", "{}"], "served as text models"),
        (["--cuda-graph-backend-decode", "full"], "host computes the routed experts.*breakable and disabled"),
        (["--disable-decode-cuda-graph"], "use --no-graphs"),
        (["--cuda-graph-config", "{}"], "use --no-graphs"),
        (["--grammar-backend", "outlines"], "bounded for xgrammar only"),
        (["--tp-size"], "kt-runtime's own option"),
        (["error"], "not an option"),
    ],
)
def test_what_it_decides_is_refused_with_the_reason(arguments: list[str], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message) as raised:
        check_passed_on(arguments)
    assert KEY not in str(raised.value)


@pytest.mark.parametrize("short", ["--tp", "--tp-siz", "--api", "--admin-api-ke", "--speculative-algo"])
def test_abbreviations_do_not_slip_past(short: str) -> None:
    with pytest.raises(InvalidValueError, match=f"unknown option {short}: "):
        check_passed_on([short, "2"])


@pytest.mark.parametrize(
    "option",
    [
        *("--hicache-size", "--hicache-storage-backend", "--enable-hierarchical-cache", "--enable-hicache"),
        *("--radix-cache-backend", "--enable-lmcache", "--enable-flexkv", "--enable-hisparse"),
        *("--enable-unified-cache-external-linker", "--unified-cache-external-linker-config"),
        "--kv-events-config",
    ],
)
def test_other_owners_of_the_prefix_cache_are_always_refused(option: str) -> None:
    with pytest.raises(InvalidValueError, match=f"{option} can't be passed on"):
        check_passed_on([option, "x"])


def test_what_changes_pages_is_refused_only_with_tiers() -> None:
    for option in ("--page-size", "--kv-cache-dtype", "--enable-streaming-session"):
        check_passed_on([option, "8"])
        with pytest.raises(InvalidValueError, match=f"{option} can't be passed on"):
            check_passed_on([option, "8"], with_tiers=True)


@pytest.mark.parametrize("arguments", [["--chunked-prefill-size", "100"], ["--chunked-prefill-size=96"]])
def test_chunks_are_whole_pages(arguments: list[str]) -> None:
    with pytest.raises(InvalidValueError, match=r"--chunked-prefill-size \d+: must be a multiple of .*, 64"):
        check_chunks(arguments, 64)
    check_chunks(arguments, 4)
    check_chunks(["--chunked-prefill-size", "-1", "--log-level", "100"], 64)


def test_every_option_that_is_refused_exists_in_sglang() -> None:
    from kt_runtime.sglang_patch.arguments import option_names

    known = option_names()
    refused = [*REFUSED, *REFUSED_WITH_TIERS, ("", CHUNK_OPTION)]
    for name in [*HARMLESS, *(name for _, names in refused for name in names.split())]:
        stem = name.rstrip("*")
        assert any(option == name or (stem != name and option.startswith(stem)) for option in known), name


def test_the_names_are_those_of_sglangs_own_parser() -> None:
    from kt_runtime.sglang_patch.arguments import option_names

    assert option_names() == NAMES


def test_everything_that_the_server_fixes_is_refused_when_passed_on() -> None:
    for option in ("--model-path", "--host", "--port", "--max-lora-rank", "--lora-backend", "--enable-lora"):
        assert reason_against(option), option
