"""What `kt-runtime bench` refuses before it measures; tests/system/bench measures."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

QUICK = {
    "cache": ("--model", "tiny-qwen3-moe", "--tokens", "256", "--page-tokens", "16", "--rounds", "2"),
    "serve": ("--quick", "--model", "tiny-qwen3-moe", "--dtype", "float32", "--rank", "4"),
    "train": ("--model", "tiny-qwen3-moe", "--sequences", "3", "--tokens", "12", "--micro-batch", "2", "--steps", "2"),
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "qwen"], "unknown shape 'qwen'; did you mean 'qwen3'?"),
        (["--shape", "4x8x64x64x8"], "a token has 8 experts, but there are 4"),
        (["--shape", "4x2x64x64"], "has 4 numbers, expected five"),
        (["--format", "int5"], "unknown format 'int5'"),
        (["--isa", "avx1024"], "unknown instruction set for this machine 'avx1024'"),
        (["--threads", "0"], "--threads is 0"),
        (["--threads", "100000"], "--threads is 100000; this process may use 1 to "),
        (["--tokens", "0"], "--tokens is 0; allowed: 1 to 65536"),
        (["--experts", "2", "--shape", "dsv2lite"], "--experts is 2; shape dsv2lite has 64"),
        (["--op", "backward"], "'backward' is not one of"),
        (["--seconds", "0"], "both must be positive"),
        (["--peer", "nosuch/python"], "nosuch/python"),
        (["--shape", "16000x8x7168x2048x8"], "TiB of memory"),
        (["--shape", "8x2x100x128x4", "--format", "int4_g32"], "100 columns have no groups of 32 columns"),
    ],
)
def test_mistakes_in_options_of_experts_are_told_and_end_with_2(run: Run, arguments: list[str], message: str) -> None:
    quick = () if "--seconds" in arguments else ("--runs", "1", "--seconds", "0.01")
    done = run("bench", "experts", *quick, *arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_help_says_what_a_shape_is(run: Run) -> None:
    done = run("bench", "experts", "--help")
    assert done.returncode == 0 and "64x6x2048x1408x8" in done.stdout.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cache", "--tokens", "100"), "--tokens is 100"),
        (("cache", "--model", "tiny-qwen4"), "tiny-qwen4"),
        (("cache", "--rounds", "0"), "--rounds is 0"),
        (("train", "--tokens", "1"), "--tokens is 1"),
        (("train", "--micro-batch", "0"), "--micro-batch is 0"),
        (("train", "--dtype", "bfloat61"), "bfloat16"),
        (("train", "--layers", "99"), "--layers is 99"),
        (("train", "--model", "tiny-qwen4"), "tiny-qwen4"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_starts(run: Run, arguments: tuple[str, ...], message: str) -> None:
    bench, *wrong = arguments
    done = run("bench", bench, *QUICK[bench], *wrong)
    assert done.returncode != 0
    assert message in done.stderr
    assert "starting a server" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--runs", "0"), "--runs is 0"),
        (("--json", "--runs", "0"), "--runs is 0"),
        (("--streams", "1000"), "--streams is 1000; must be 1 to 256"),
        (("--prefill", "100000"), "--prefill is 100000; tiny-qwen3-moe has a context of"),
        (("--model", "tiny-qwen4"), "--model 'tiny-qwen4': neither a preset nor a checkpoint's directory"),
        (("--peer", "nosuch/python"), "--peer nosuch/python: no such file"),
        (("--json", "nosuch/result.json"), "--json nosuch/result.json: there is no directory"),
        (("--json", "."), "--json .: is a directory; expected a file's name"),
        (("--json", "/proc/1/result.json"), "--json /proc/1/result.json: nothing can be written to /proc/1"),
        (("--dtype", "bfloat61"), "bfloat16"),
    ],
)
def test_a_wrong_option_of_serve_is_one_line_and_ends_with_2(
    run: Run, arguments: tuple[str, ...], message: str
) -> None:
    done = run("bench", "serve", *QUICK["serve"], *arguments)
    assert done.returncode == 2
    assert message in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_checkpoint_keeps_its_layers(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = run("bench", "train", "--model", str(tmp_path), "--layers", "2")
    assert done.returncode != 0 and "--layers is for presets" in done.stderr
