"""What `bench serve` measures, what the machine allows, and how it counts."""

from __future__ import annotations

import errno
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from kt_runtime.bench.experts.limits import Limits, Work
from kt_runtime.bench.serve import fit, peers, run
from kt_runtime.bench.serve.adapters import adapter_bytes, random_adapter
from kt_runtime.bench.serve.plan import DECODE, PREFILL, QUICK, Case, Plan
from kt_runtime.bench.serve.report import print_report
from kt_runtime.bench.serve.rows import Measured, Row, TokenTime
from kt_runtime.bench.serve.server_side import ServerResult, Transcript
from kt_runtime.bench.serve.streams import Stream, decode, tokens_per_s
from kt_runtime.bench.serve.work import model_work
from kt_runtime.cli.interrupts import SIGNALS, Interruptible
from kt_runtime.errors import InvalidValueError, NotFoundError, ServerUnreachableError, UnknownNameError
from kt_runtime.families.gguf import packed_bytes
from kt_runtime.serve.models.presets import load_preset

LIMITS = Limits("x", 2, dram_bytes_per_s=33e9, bf16_flops=1e12, int8_ops=2e12)
QWEN, DEEPSEEK = load_preset("bench-qwen3-moe").config, load_preset("bench-deepseek-v3").config
GPT_OSS, QWEN3_5 = load_preset("bench-gpt-oss").config, load_preset("bench-qwen3-5-moe").config


def same(expected: Any) -> Any:
    """Equal but for the rounding of a few float64 operations: 2.2e-16 was measured."""
    return pytest.approx(expected, rel=1e-15, abs=0)


def test_the_default_cases_are_prompts_then_streams_then_streams_with_adapters() -> None:
    for config in (QWEN, DEEPSEEK):
        cases = Plan().cases(config)
        assert [case.size for case in cases if case.kind == PREFILL] == [512, 2048, 8192]
        decode = [(case.size, case.adapters) for case in cases if case.kind == DECODE]
        assert decode == [(count, adapters) for adapters in (False, True) for count in (1, 4, 8, 16, 32)]
    assert len(Plan(default_sizes=QUICK, with_adapters=False).cases(QWEN)) == 3


def test_default_prompts_beyond_the_context_are_left_out_and_given_ones_refused() -> None:
    small = QWEN | {"max_position_embeddings": 1024}
    assert [case.size for case in Plan().cases(small) if case.kind == PREFILL] == [512]
    with pytest.raises(
        InvalidValueError, match=r"--prefill is 2048; .* has a context of 1024 tokens, which allows 1008"
    ):
        Plan(prefill=(2048,)).cases(small)
    with pytest.raises(InvalidValueError, match="--prompt-tokens 1000 and --new-tokens 64 are 1064 tokens"):
        Plan(prompt_tokens=1000).cases(small)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runs": 0}, "--runs is 0; must be 1 or more"),
        ({"new_tokens": 3}, "--new-tokens is 3; must be 4 or more"),
        ({"streams": (1, 257)}, "--streams is 257; must be 1 to 256"),
        ({"prefill": (0,)}, "--prefill is 0"),
        ({"peer": Path("nosuch/python")}, "--peer nosuch/python: no such file"),
        ({"dtype": "float16"}, "unknown dtype 'float16'"),
    ],
)
def test_a_number_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidValueError, NotFoundError, UnknownNameError), match=message):
        Plan(**options)


def test_the_dram_limit_counts_distinct_experts() -> None:
    """Tokens/s of the bench preset in bf16 at 33 GB/s with an empty context, computed by hand."""
    work = model_work(QWEN, "bfloat16")
    for streams, rate in ((1, 152), (4, 214), (8, 254), (16, 326)):
        seconds, bottleneck = work.decode(streams, 0, work.expected_experts(streams)).limit(LIMITS)
        assert bottleneck == "dram" and streams / seconds == pytest.approx(rate, rel=0.005)
    assert work.expected_experts(1) == same(4)


def test_matrices_of_a_gguf_file_count_packed() -> None:
    name, plain = "model.layers.0.self_attn.o_proj.weight", model_work(QWEN, "bfloat16")
    dense = {name: "Q8_0", "lm_head.weight": "Q8_0"}
    packed = {"quant_method": "gguf", "files": ["x"], "experts": [["Q8_0", "Q8_0"]] * 12, "dense": dense}
    work = model_work({**QWEN, "quantization_config": packed}, "bfloat16")
    assert plain.dense_bytes - work.dense_bytes == 2 * 1024 * 1024 - packed_bytes("Q8_0", 1024, 1024)
    assert (plain.head_bytes, work.head_bytes) == (2 * 768 * 1024, packed_bytes("Q8_0", 768, 1024))
    assert (plain.dense_parameters, plain.head_parameters) == (work.dense_parameters, work.head_parameters)
    step, whole = work.native_step(1, 100, 4.0), work.decode(1, 100, 4.0)
    assert whole.weight_bytes - step.weight_bytes == work.head_bytes


def test_a_step_reads_the_kv_of_all_streams_and_each_stream_s_adapter() -> None:
    work = model_work(QWEN, "bfloat16")
    empty = work.decode(8, 0, 20.0)
    cached = work.decode(8, 100, 20.0)
    assert cached.weight_bytes - empty.weight_bytes == 8 * 100 * 12 * 2 * 4 * 64 * 2
    adapted = work.decode(8, 0, 20.0, adapter_rank=16)
    attention = (1024 + 1024) + 2 * (1024 + 256) + (1024 + 1024)
    experts = 4 * 3 * (1024 + 512)
    assert adapted.weight_bytes - empty.weight_bytes == 8 * 16 * 12 * (attention + experts) * 2
    assert adapted.operations["bf16"] > empty.operations["bf16"]


def test_the_native_step_s_work_is_a_decode_step_without_the_head() -> None:
    work = model_work(QWEN, "bfloat16")
    whole, step = work.decode(1, 100, 4.0), work.native_step(1, 100, 4.0)
    assert whole.weight_bytes - step.weight_bytes == 768 * 1024 * 2
    assert whole.operations["bf16"] - step.operations["bf16"] == 2 * 768 * 1024


def test_a_prompt_s_operations_are_those_of_its_matrices_and_its_triangle_of_attention() -> None:
    operations = model_work(QWEN, "bfloat16").prefill(512).operations["bf16"]
    attention_matrices = 2 * 1024 * 1024 + 2 * 1024 * 256
    layer = 512 * (attention_matrices + 64 * 1024 + 4 * 3 * 1024 * 512) + 512 * 513 / 2 * 16 * 2 * 64
    assert operations == pytest.approx(2 * (12 * layer + 768 * 1024), rel=0.001)  # norms are not in the sum here
    absorbed, expanded = (
        getattr(model_work(DEEPSEEK, "bfloat16"), f"{how}_pair_ops") for how in ("absorbed", "expanded")
    )
    assert (absorbed, expanded) == (2 * 12 * 16 * (2 * 256 + 32), 2 * 12 * 16 * (64 + 32 + 64))


def test_a_window_bounds_what_a_token_sees() -> None:
    """Of twelve layers six see 128 tokens at most."""
    work, key_bytes = model_work(GPT_OSS, "bfloat16"), 2 * 3 * 64 * 2
    for context, of_six in ((100, 100), (1000, 128)):
        read = work.decode(2, context, 20.0).weight_bytes - work.decode(2, 0, 20.0).weight_bytes
        assert read == same(2 * 6 * (context + of_six) * key_bytes)
    plain = work.prefill(1).operations["bf16"] - 2 * work.head_parameters
    attention = work.prefill(1000).operations["bf16"] - 2 * work.head_parameters - 1000 * plain
    pairs = 6 * (1000 * 1001 / 2 + 128 * 129 / 2 + 872 * 128) - 12 * 1000  # a token alone sees itself
    assert attention == same(pairs * 2 * 24 * 2 * 64)


def test_a_step_reads_and_writes_the_states_of_gated_deltanet_layers() -> None:
    work = model_work(QWEN3_5, "bfloat16")
    state, inputs = 9 * 16 * 128 * 128, 9 * (2 * 8 + 16) * 128 * 3
    more = work.decode(5, 0, 20.0).weight_bytes - work.decode(4, 0, 20.0).weight_bytes
    assert more == 2 * (state * 4 + inputs * 2)
    assert work.decode(1, 100, 4.0).weight_bytes - work.decode(1, 0, 4.0).weight_bytes == 100 * 3 * 2 * 2 * 256 * 2
    stateless = replace(work, state_numbers=0)
    assert work.prefill(7).operations["bf16"] - stateless.prefill(7).operations["bf16"] == 7 * 6 * state


def test_all_bench_presets_have_about_as_many_parameters() -> None:
    works = [model_work(config, "bfloat16") for config in (QWEN, DEEPSEEK, GPT_OSS, QWEN3_5)]
    totals = [work.dense_parameters + work.moe_layers * work.num_experts * work.expert_parameters for work in works]
    assert all(1.1e9 < total < 1.35e9 for total in totals)


def test_a_row_is_held_against_the_limit_by_its_median() -> None:
    row = Row(
        Case(DECODE, 8, adapters=True),
        Measured([100.0, 60.0, 80.0]),
        Work(33e9 / 20, {"bf16": 1.0}),
        experts=20.5,
        are_counted=True,
        peers={"llama_cpp": Measured([40.0, 50.0, 30.0], same_tokens=1.0)},
    ).as_json(LIMITS)
    assert (row["case"], row["streams"], row["adapters"]) == ("decode", 8, True) and "tokens" not in row
    assert (row["tokens_per_s"], row["tokens_per_s_best"]) == (80.0, 100.0)
    assert row["limit_tokens_per_s"] == same(160) and row["limit"] == "dram"
    assert row["limit_share"] == same(0.5) and row["limit_share_best"] == same(0.625)
    assert row["peers"] == {"llama_cpp": 40.0} and row["peers_best"] == {"llama_cpp": 50.0}
    unknown = Row(Case(PREFILL, 512), Measured([1.0]), Work(1.0, {"bf16": 1.0})).as_json(None)
    assert unknown["tokens"] == 512 and unknown["limit_share"] is None and unknown["experts_counted"] is None


def test_a_token_s_time_is_the_native_step_s_sampling_s_and_the_rest() -> None:
    """Tokens of 10, 8 and 12.5 ms; the step takes 6, 5 and 10 ms of them, and 4 ms at the limit; a peer takes 16 ms."""
    times = [TokenTime(0.006, 0.001, 0.001), TokenTime(0.005, 0.001, 0.002), TokenTime(0.010, 0.001, 0.0005)]
    measured = Measured([100.0, 125.0, 80.0], token_times=times)
    whole, work = Work(33e9 / 200, {"bf16": 1.0}), Work(33e9 / 250, {"bf16": 1.0})
    peers = {"llama_cpp": Measured([1000 / 16])}
    step = Row(Case(DECODE, 1), measured, whole, step_work=work, peers=peers).as_json(LIMITS)["step"]
    assert step["head_ms"] == same(1.0) and step["peers"] == {"llama_cpp": same(16 / 7)}
    assert (step["ms"], step["ms_best"], step["limit_ms"]) == same((6.0, 5.0, 4.0))
    assert (step["limit_share"], step["limit_share_best"]) == same((4 / 6, 4 / 5))
    assert step["sampling_ms"] == same(1.0) and step["sampling_ms_runs"] == same([1.0, 2.0, 0.5])
    assert step["rest_ms_runs"] == pytest.approx([2.0, 0.0, 1.0], rel=1e-13, abs=1e-14)
    assert step["ms_runs"] == same([6.0, 5.0, 10.0]) and step["limit"] == "dram"
    unknown = Row(Case(DECODE, 1), measured, whole, step_work=work).as_json(None)["step"]
    assert unknown["limit_share"] is None and unknown["rest_ms"] == pytest.approx(1.0, rel=1e-13)
    assert Row(Case(DECODE, 1), Measured([100.0]), whole, step_work=work).as_json(LIMITS)["step"] is None


def test_a_case_that_was_not_measured_is_a_row_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    case, work = Case(DECODE, 2), model_work(QWEN, "bfloat16")
    server = ServerResult({"step": "running"}, problems={case: "0 of 2 runs were measured"})
    row = run._row(Plan(), case, work, server, []).as_json(LIMITS)
    for name in ("tokens_per_s", "tokens_per_s_best", "limit_share", "limit_share_best", "step"):
        assert row[name] is None
    assert row["tokens_per_s_runs"] == [] and row["peers"] == {} and row["limit_tokens_per_s"] > 0
    assert row["problem"] == "0 of 2 runs were measured"
    printed = printed_report(capsys, [row], {})
    assert "not measured" in printed and "decode, 2 streams: 0 of 2 runs were measured" in printed


def test_the_base_s_streams_have_their_step_timed() -> None:
    work, server = model_work(QWEN, "bfloat16"), ServerResult({"step": "running"})
    for case, is_timed in (
        (Case(DECODE, 1), True),
        (Case(DECODE, 2), True),
        (Case(DECODE, 1, adapters=True), False),
        (Case(PREFILL, 8), False),
    ):
        assert (run._row(Plan(), case, work, server, []).step_work is not None) == is_timed


def test_the_rate_is_that_of_the_time_in_which_all_streams_decode() -> None:
    """Two streams with a token a second; the second one begins later, and the first one's burst at its end is alone."""
    first = Stream([(0.0, 1), (1.0, 2), (2.0, 3), (3.0, 4), (4.0, 5)])
    second = Stream([(1.5, 1), (2.5, 2), (3.5, 3), (3.6, 9), (9.0, 10)])
    assert tokens_per_s([first, second]) == same(1.0 + 8 / 2.1)
    assert tokens_per_s([first]) == same(1.0)
    assert tokens_per_s([first, Stream([(3.5, 1), (9.0, 2)])]) is None
    assert tokens_per_s([first, Stream([(5.0, 1), (6.0, 2)])]) is None


def test_an_adapter_has_the_bytes_that_are_planned_for_it() -> None:
    config = load_preset("tiny-deepseek-v3").config
    adapter = random_adapter(config, 4)
    numbers = sum(pair.a.numel() + pair.b.numel() for pair in adapter.modules.values())
    assert adapter_bytes(config, 4) == 2 * numbers
    assert all(bool(pair.a.any()) and bool(pair.b.any()) for pair in adapter.modules.values())


def test_what_does_not_fit_is_refused_with_this_command_s_options(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan()
    cases = plan.cases(QWEN)
    fit.check_disk(Plan(streams=(1,), with_adapters=False), [Case(DECODE, 1)], load_preset("tiny-qwen3-moe").config)
    monkeypatch.setattr("kt_runtime.serve.memory.machine.available_cpu_bytes", lambda: 8 << 30)
    with pytest.raises(InvalidValueError, match=r"bench-qwen3-moe does not fit: .*32 loaded adapters 3.*--streams"):
        fit.check_memory(plan, cases, QWEN, "bfloat16")
    monkeypatch.setattr(fit.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 30}))
    with pytest.raises(InvalidValueError, match=r"1 GiB free, the files of this run need .* GiB; set TMPDIR"):
        fit.check_disk(plan, cases, QWEN)


def test_an_interrupted_peer_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The signal arrives when the peer has answered its first line, and then computes."""
    script = tmp_path / "script.py"
    script.write_text(
        'import time\nprint(\'{"facts": {}}\', flush=True)\nprint(\'{"case": 0, "seconds": [1.0], '
        '"experts": null, "same_tokens": 1.0}\', flush=True)\ntime.sleep(600)\n'
    )
    monkeypatch.setattr(peers, "SCRIPT", script)
    others, children = psutil.Process().children(), list[psutil.Process]()

    def say(line: str) -> None:
        if "tokens/s" in line:
            children.extend(child for child in psutil.Process().children() if child not in others)
            signal.raise_signal(signal.SIGINT)

    # Python's own: a background job of a shell ignores SIGINT, and so would the command.
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    peer, case = peers.ScriptPeer(peers.HUGGING_FACE, Path(sys.executable), say), Case(PREFILL, 8)
    try:
        with pytest.raises(KeyboardInterrupt), Interruptible():
            peer.measure(tmp_path, {case: (Measured([1.0]), Transcript([[[1]]], [[[1]]]))}, "float32", 1, tmp_path)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert len(children) == 1 and not children[0].is_running()
    assert peer.measured[case].rates == [8.0]


def test_a_peer_that_does_not_start_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("")
    peer = peers.ScriptPeer(peers.LLAMA_CPP, tmp_path / "python", lambda _: None)
    peer.measure(tmp_path, {}, "float32", 1, tmp_path)
    assert "python does not start: [Errno 13]" in str(peer.problem)


def test_a_peer_that_ends_without_an_answer_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An interpreter that is none, such as /bin/true, ends with status 0; others print lines of their own."""
    script, case = tmp_path / "script.py", Case(PREFILL, 8)
    script.write_text("import sys\nsys.stdout.buffer.write(b'{}\\n{\\xff\\n[1]\\n')\nsys.stderr.write('bye')\n")
    monkeypatch.setattr(peers, "SCRIPT", script)
    peer = peers.ScriptPeer(peers.LLAMA_CPP, Path(sys.executable), lambda _: None)
    peer.measure(tmp_path, {case: (Measured([1.0]), Transcript([[[1]]], [[[1]]]))}, "float32", 1, tmp_path)
    assert peer.problem == "ended with status 0 after 0 of 1 cases: bye" and not peer.measured


def test_a_gguf_file_that_can_t_be_written_is_the_peer_s_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the server was measured at stays."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run, "write_gguf_model", full)
    peer = peers.ScriptPeer(peers.LLAMA_CPP, Path(sys.executable), lambda _: None)
    run.measure_script(peer, tmp_path, {}, "float32", tmp_path, peers.ON_CPU)
    assert peer.problem == "no GGUF file: [Errno 28] No space left on device"


def test_a_server_that_has_ended_is_said_to_be_unreachable() -> None:
    with pytest.raises(ServerUnreachableError, match=r"http://127\.0\.0\.1:9/generate: "):
        decode("http://127.0.0.1:9", [[1]], 4, [None], 5.0)


def printed_report(capsys: pytest.CaptureFixture[str], rows: list[dict[str, Any]], peers: dict[str, Any]) -> str:
    """What people read, on one line."""
    limits = {"dram_bytes_per_s": 33e9, "bf16_flops": 1e12, "isa": "x", "threads": 2}
    serving = {"model": "m", "dtype": "bfloat16", "runs": 1, "prompt_tokens": 8, "new_tokens": 9, "rank": 16}
    logprobs = {"peers": {"llama_cpp": {"tokens": 9, "mean": 0.0251, "largest": 0.3}}, "format": None}
    report = {"machine": {"limits": limits}, "serving": serving | {"gguf": None}, "peers": peers, "rows": rows}
    print_report(report | {"logprobs": logprobs})
    return " ".join(capsys.readouterr().out.split())


def test_people_get_a_table_with_peers_and_problems(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row(
        Case(DECODE, 4), Measured([80.0]), Work(33e9 / 40, {"bf16": 1.0}), peers={"llama_cpp": Measured([40.0])}
    ).as_json(LIMITS)
    peers = {"hugging_face": {"problem": "ended with signal 9"}, "llama_cpp": {"problem": None}}
    printed = printed_report(capsys, [row], peers)
    for text in ("decode, 4 streams", "0.50 dram", "2.00x", "33.0 GB/s", "0.025 in the mean, 0.3 at most, 9 tokens"):
        assert text in printed
    assert "hugging_face: ended with signal 9" in printed and "the format" not in printed


def test_people_read_what_the_native_step_takes_of_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    work = Work(33e9 / 250, {"bf16": 1.0})
    measured = Measured([100.0], token_times=[TokenTime(0.005, 0.001, 0.002)])
    peers = {"llama_cpp": Measured([50.0])}
    row = Row(Case(DECODE, 1), measured, work, step_work=work, peers=peers).as_json(LIMITS)
    printed = printed_report(capsys, [row], {})
    assert "the native step takes 5.00 ms, 0.80 dram; head 1.00 ms; sampling 2.00 ms; scheduling and HTTP" in printed
    assert "HTTP 2.00 ms. llama_cpp's time / step and head: 3.33." in printed
