"""`kt-runtime bench serve` on a tiny model: real servers with and without the native step, Hugging Face, and an
interpreter without llama.cpp."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from system.forked_server import processes, start_command

from kt_runtime.bench.page.measurement import Measurement, Range

BenchOutput = Callable[..., tuple[str, str]]
Recorded = Callable[[dict[str, Any]], Measurement]

QUICK = ("--quick", "--model", "tiny-qwen3-moe", "--dtype", "float32", "--rank", "4")
PEERS = ["SGLang without the step", "Hugging Face", "llama.cpp"]
LOGPROB_TOLERANCE = 3e-5  # of float32: 4.4e-6 measured with AVX-512, 3.4e-6 with AVX2
ROW_KEYS = {"case", "adapters", "tokens_per_s", "limit_share", "step", "peers", "problem"}


@pytest.fixture(scope="module")
def result(bench_output: BenchOutput, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """(the JSON file, the printed table)."""
    path = tmp_path_factory.mktemp("bench-serve") / "result.json"
    choice = ["--prefill", "64", "--runs", "2", "--peer", sys.executable, "--json", str(path)]
    # Streams of a tiny model last long enough to decode at the same time, also where the client hardly gets a core.
    choice += ["--new-tokens", "192"]
    printed, _ = bench_output("serve", *QUICK, *choice)
    return json.loads(path.read_text()), printed


def test_there_is_a_row_for_each_case(result: tuple[dict[str, Any], str]) -> None:
    rows = result[0]["rows"]
    cases = [(row["case"], row.get("tokens", row.get("streams")), row["adapters"]) for row in rows]
    decode = [("decode", count, adapters) for adapters in (False, True) for count in (1, 4)]
    assert cases == [("prefill", 64, False), *decode]
    for row in rows:
        assert row.keys() >= ROW_KEYS
        assert len(row["tokens_per_s_runs"]) == 2
        assert 0 < row["tokens_per_s"] <= row["tokens_per_s_best"] and row["limit_share"] > 0 and row["problem"] is None
        assert row["limit_share"] == row["tokens_per_s"] / row["limit_tokens_per_s"]


def test_the_native_step_is_timed_for_streams_of_the_base(result: tuple[dict[str, Any], str]) -> None:
    assert result[0]["serving"]["step"] == "running"
    for row in result[0]["rows"]:
        is_timed = (row["case"], row["adapters"]) == ("decode", False)
        assert (row["step"] is not None) == is_timed
        if is_timed:
            step = row["step"]
            assert 0 < step["ms_best"] <= step["ms"] and step["sampling_ms"] > 0
            assert step["limit_share"] == step["limit_ms"] / step["ms"]
            assert step["head_ms"] > 0 and step["peers"].keys() == row["peers"].keys()
            whole_ms = [1e3 * row["streams"] / rate for rate in row["tokens_per_s_runs"]]
            names = ("ms_runs", "head_ms_runs", "sampling_ms_runs", "rest_ms_runs")
            parts_ms = zip(*(step[name] for name in names), strict=True)
            assert list(map(sum, parts_ms)) == pytest.approx(whole_ms, rel=1e-15, abs=0)  # 1.2e-16 measured


def test_a_second_server_without_the_step_gives_the_same_tokens(result: tuple[dict[str, Any], str]) -> None:
    peer = result[0]["peers"]["sglang_no_step"]
    assert (peer["step"], peer["problem"]) == ("--no-step", None)
    shares = [row["same_tokens"]["sglang_no_step"] for row in result[0]["rows"]]
    assert shares == [1, 1, 1, 1, 1]


def test_peers_compute_the_base_s_cases_on_the_same_tokens(result: tuple[dict[str, Any], str]) -> None:
    """In float32 Hugging Face chooses what the server chose; only a tie could differ."""
    for row in result[0]["rows"]:
        others = set() if row["adapters"] else {"hugging_face"}
        assert row["peers"].keys() == {"sglang_no_step"} | others
        assert all(share > 0.95 for share in row["same_tokens"].values())
        assert all(rate > 0 for rate in row["peers"].values())


def test_log_probabilities_are_hugging_face_s(result: tuple[dict[str, Any], str]) -> None:
    found = result[0]["logprobs"]
    assert found["format"] is None and found["peers"]["llama_cpp"] is None
    hugging_face = found["peers"]["hugging_face"]
    print(f"of log-probabilities: {hugging_face}")
    assert hugging_face["tokens"] == 4 * 127 and hugging_face["largest"] <= LOGPROB_TOLERANCE


def test_one_gguf_file_is_served_and_given_to_llama_cpp(bench_output: BenchOutput, tmp_path: Path) -> None:
    """Without llama.cpp here, its row says so. The directory that stands for the file has gone at the end."""
    choice = ("--quick", "--model", "tiny-olmoe", "--gguf", "Q4_K_M", "--no-sglang", "--no-adapters", "--prefill", "64")
    sizes = ("--streams", "1", "--streams", "2", "--peer", sys.executable, "--json", str(tmp_path / "result.json"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        printed, said = bench_output("serve", *choice, *sizes)
    report = json.loads((tmp_path / "result.json").read_text())
    file = report["serving"]["gguf"]
    assert file["mix"] == "Q4_K_M" and file["types"].keys() == {"F32", "Q5_0", "Q8_0"} and file["bytes"] > 1e6
    assert report["peers"].keys() == {"llama_cpp"}
    assert report["logprobs"] == {"peers": {"llama_cpp": None}, "format": None}
    assert len(report["rows"]) == 3 and all(row["tokens_per_s"] > 0 for row in report["rows"])
    assert "tiny-olmoe in Q4_K_M (GGUF)" in printed and "the GGUF file in Q4_K_M" in said
    assert not list((tmp_path / "cache").rglob("config.json"))


def test_distinct_experts_are_counted(result: tuple[dict[str, Any], str]) -> None:
    """A token takes two of eight experts."""
    counts = {(row["streams"], row["adapters"]): row for row in result[0]["rows"] if row["case"] == "decode"}
    assert all(row["experts_counted"] for row in counts.values())
    assert counts[1, False]["distinct_experts"] == 2
    assert 2 <= counts[4, False]["distinct_experts"] <= 8
    assert counts[4, True]["distinct_experts"] == counts[4, False]["distinct_experts"]


def test_a_peer_that_is_not_installed_is_said_to_be_missing(result: tuple[dict[str, Any], str]) -> None:
    assert "No module named 'llama_cpp'" in result[0]["peers"]["llama_cpp"]["problem"]
    assert result[0]["peers"]["hugging_face"]["problem"] is None
    assert "No module named 'llama_cpp'" in result[1] and "prefill, 64 tokens" in result[1]


def test_a_report_becomes_a_measurement(result: tuple[dict[str, Any], str], recorded: Recorded) -> None:
    report = result[0]
    made = recorded(report)
    assert made.kind == "serving" and [column.name for column in made.tables[0].columns][4:7] == PEERS
    assert [row.case[1:] for row in made.tables[0].rows][::2] == [
        ["prefill", "64 tokens"],
        ["decode", "4 streams"],
        ["decode, an adapter each", "4 streams"],
    ]
    for row, wanted in zip(made.tables[0].rows, report["rows"], strict=True):
        median, runs, limit, share, sglang, hugging_face, llama_cpp, _, ratio, _ = row.figures
        for name, cell in (("tokens_per_s", median), ("limit_tokens_per_s", limit), ("limit_share", share)):
            assert float(str(cell)) == pytest.approx(wanted[name], rel=5e-4)  # four digits: half of the last one
        assert isinstance(runs, Range) and runs.least <= runs.most
        assert llama_cpp is None and sglang is not None
        assert (hugging_face is None) == (ratio is None) == wanted["adapters"]
    notes = made.tables[0].notes
    assert "step --no-step" in notes[0] and "torch " in notes[1]
    assert "problem" not in notes[0] + notes[1] and "problem " in notes[2]


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """SGLang's sockets lie in it, and a socket's path has 107 characters at most: `tmp_path` can be too long."""
    with tempfile.TemporaryDirectory(prefix="kt-") as directory:
        yield Path(directory)


@pytest.mark.parametrize("moment", ["starting a server", "prefill"])
def test_an_interrupted_run_leaves_no_process_and_no_file(
    moment: str, short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a terminal: SIGINT to the process group. After "prefill" many long answers follow, so that the signal
    arrives while they are decoded, however late this test gets processor time."""
    monkeypatch.chdir(short_directory)
    sizes = ["--prefill", "64", "--streams", "1", "--new-tokens", "800", "--runs", "100"]
    before = processes()
    process = start_command(["bench", "serve", *QUICK, *sizes], TMPDIR=str(short_directory))
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if line.startswith(moment):
            break
    children = {each for each in processes() - before if each.pid != process.pid}
    os.killpg(process.pid, signal.SIGINT)
    more, _ = process.communicate(timeout=60)
    assert process.returncode == 130, "".join(said) + more
    assert more.splitlines()[-1] == "kt-runtime: interrupted" and "Traceback" not in more
    assert len(children) > 2 or moment != "prefill"  # of the server: frontend, scheduler and detokenizer at least
    assert not psutil.wait_procs(children, timeout=60)[1]
    assert not list(short_directory.glob("kt-runtime-bench-*"))
