"""`kt-runtime bench`: how fast this machine is, and how near kt-runtime comes to it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kt_runtime.bench.scale.command import scale
from kt_runtime.cli.interrupts import Say, with_progress
from kt_runtime.errors import InvalidValueError

if TYPE_CHECKING:
    from kt_runtime.wire.messages import Activations

checkout_option = click.option(
    "--checkout",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Of kt-runtime. [default: the current directory]",
)


@click.group(name="bench", help=__doc__)
def command() -> None:
    pass


command.add_command(scale)


@command.command(name="experts")
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    help="dsv2lite, qwen3, dsv3, kimi, or experts x top-k x hidden x intermediate x rank, as 64x6x2048x1408x8."
    " [default: dsv2lite, qwen3]",
)
@click.option(
    "--format",
    "formats",
    multiple=True,
    help="bf16, fp8, int8, int4, int4_g32, int4_g128, int4_g128_zp, int8_g128, int8_channel, fp8_channel, nvfp4, "
    "mxfp8; GGUF's q8_0, q4_0, q5_0, mxfp4, q4_k, q5_k, q6_k, iq4_nl, iq4_xs. [default: bf16, fp8, int8, int4]",
)
@click.option(
    "--isa",
    "isas",
    multiple=True,
    help="Kernels: amx, avx512, avx512_vnni, avx512_base (AVX-512 without a bf16 dot product, with VNNI and without), "
    "avx2, portable. [default: the best here]",
)
@click.option("--threads", type=int, multiple=True, help="[default: 1 and all]")
@click.option("--tokens", type=int, multiple=True, help="In a batch. [default: 1, 4, 16, 64, 512]")
@click.option(
    "--op",
    "ops",
    type=click.Choice(["forward", "forward_backward"]),
    multiple=True,
    help="[default: forward; forward_backward with the most tokens only]",
)
@click.option("--experts", "num_experts", type=int, help="Fewer experts than the shape has, so that it fits.")
@click.option(
    "--activation",
    "activations",
    multiple=True,
    help="silu, silu_clamped, swigluoai (with biases), gelu, gelu_pytorch_tanh, relu2 (without a gate)."
    " Peers are measured only with silu alone. [default: silu]",
)
@click.option(
    "--peer",
    type=click.Path(path_type=Path),
    metavar="PYTHON",
    help="Also measure kt-kernel, installed for that interpreter.",
)
@click.option("--torch/--no-torch", "with_torch", default=True, show_default=True, help="Also measure PyTorch.")
@click.option("--runs", default=5, show_default=True, help="Calls of a case, at least.")
@click.option("--seconds", default=0.5, show_default=True, help="Time of a case, at least; five times as long ends it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_progress
def experts(
    say: Say,
    shapes: tuple[str, ...],
    formats: tuple[str, ...],
    isas: tuple[str, ...],
    threads: tuple[int, ...],
    tokens: tuple[int, ...],
    ops: tuple[str, ...],
    num_experts: int | None,
    activations: tuple[str, ...],
    peer: Path | None,
    with_torch: bool,
    runs: int,
    seconds: float,
    as_json: bool,
) -> None:
    """Time the experts of one layer against the machine's limits, PyTorch and kt-kernel.

    \b
    Options that name several things may be given several times. Progress goes to stderr.
    What is measured and how: docs/bench.md.
    """
    from kt_runtime.bench.experts.measurement import Patience
    from kt_runtime.bench.experts.plan import make_plan
    from kt_runtime.bench.experts.report import print_report
    from kt_runtime.bench.experts.run import Run

    plan = make_plan(
        shapes=shapes,
        formats=formats,
        isas=isas,
        threads=threads,
        tokens=tokens,
        ops=ops,
        num_experts=num_experts,
        activations=activations,
        peer=peer,
        with_torch=with_torch,
        patience=Patience(runs, seconds),
    )
    result = Run(plan, say).result()
    _show(result, print_report, as_json)


@command.command(name="train")
@click.option(
    "--model", default="bench-qwen3-moe", show_default=True, help="A preset that can be made, or a directory."
)
@click.option("--layers", type=int, help="Fewer layers than the preset has.")
@click.option(
    "--targets",
    type=click.Choice(["attention", "attention+experts"]),
    multiple=True,
    help="What LoRA is on. [default: both]",
)
@click.option(
    "--activations", type=click.Choice(["retain", "recompute"]), multiple=True, help="In backward. [default: both]"
)
@click.option("--sequences", default=8, show_default=True, help="In a step.")
@click.option("--tokens", default=256, show_default=True, help="In a sequence.")
@click.option("--micro-batch", default=1, show_default=True, help="Sequences that the peer computes at once.")
@click.option("--microbatch-tokens", default=2048, show_default=True, help="Tokens that the server computes at once.")
@click.option("--steps", default=3, show_default=True, help="Counted steps; two more go before.")
@click.option("--rank", default=8, show_default=True, help="Of LoRA.")
@click.option("--dtype", help="The server's: bfloat16 or float32. [default: the faster one here]")
@click.option("--peer-dtype", help="The peer's: bfloat16 or float32. [default: the faster one here, by a short step]")
@click.option(
    "--peer/--no-peer", "with_peer", default=True, show_default=True, help="Also measure Hugging Face + PEFT."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_progress
def train(
    say: Say, as_json: bool, targets: tuple[str, ...], activations: tuple[Activations, ...], **options: Any
) -> None:
    """Time LoRA fine-tuning through a real server against Hugging Face + PEFT doing the same.

    \b
    Options that name several things may be given several times. Progress goes to stderr.
    What is measured and how: docs/bench.md.
    """
    from kt_runtime.bench.train.plan import ACTIVATIONS, TARGETS, Plan
    from kt_runtime.bench.train.report import print_report
    from kt_runtime.bench.train.run import run

    plan = Plan(targets=targets or TARGETS, activations=activations or ACTIVATIONS, **options)
    result = run(plan, say)
    _show(result, print_report, as_json)


@command.command(name="rl")
@click.option(
    "--model", default="bench-qwen3-moe", show_default=True, help="A preset that can be made, or a directory."
)
@click.option("--layers", type=int, help="Fewer layers than the preset has.")
@click.option("--prompts", default=4, show_default=True, help="In a rollout, which is one step.")
@click.option("--generations", default=8, show_default=True, help="Answers to each prompt.")
@click.option("--prompt-tokens", default=128, show_default=True, help="Of a prompt.")
@click.option("--new-tokens", default=64, show_default=True, help="Of an answer.")
@click.option("--steps", default=3, show_default=True, help="Counted steps, after one that is not counted.")
@click.option("--rounds", default=3, show_default=True, help="Of first tokens and of the group's rate.")
@click.option("--rank", default=8, show_default=True, help="Of LoRA, on all targets.")
@click.option("--dtype", help="The server's: bfloat16 or float32. [default: the faster one here]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_progress
def rl(say: Say, as_json: bool, **options: Any) -> None:
    """Time steps of reinforcement learning through a real server, and where their time goes.

    \b
    Progress goes to stderr.
    What is measured and how: docs/bench.md.
    """
    from kt_runtime.bench.rl.plan import Plan
    from kt_runtime.bench.rl.report import print_report
    from kt_runtime.bench.rl.run import run

    result = run(Plan(**options), say)
    _show(result, print_report, as_json)


@command.command(name="interfere")
@click.option(
    "--model", default="bench-qwen3-moe", show_default=True, help="A preset that can be made, or a directory."
)
@click.option("--layers", type=int, help="Fewer layers than the preset has.")
@click.option(
    "--load",
    "loads",
    type=float,
    multiple=True,
    help="Of the server's capacity; 0.5 always. [default: 0.25, 0.5, 0.75]",
)
@click.option("--seconds", default=40.0, show_default=True, help="Of arrivals at half load; half as long at others.")
@click.option("--warm-up-seconds", default=10.0, show_default=True, help="Of arrivals before anything counts.")
@click.option("--alone-seconds", default=12.0, show_default=True, help="Of training without requests, in a round.")
@click.option("--alone-rounds", default=3, show_default=True, help="Of that with targets and without, in turn.")
@click.option("--burst", default=24, show_default=True, help="Requests whose rate is the capacity.")
@click.option("--concurrency", default=16, show_default=True, help="Requests that the server computes at once.")
@click.option("--sequences", default=2, show_default=True, help="In a training step.")
@click.option("--tokens", default=512, show_default=True, help="In a sequence.")
@click.option("--rank", default=8, show_default=True, help="Of LoRA on attention.")
@click.option("--seed", default=0, show_default=True, help="Of arrivals and lengths.")
@click.option("--tpot-target-ms", type=float, help="[default: 1.25 times the p99 at half load without training]")
@click.option("--ttft-target-ms", type=float, help="[default: twice the p99 at half load without training]")
@click.option(
    "--train-share", default=0.9, show_default=True, help="Largest share of time for training while requests run."
)
@click.option("--dtype", help="The server's: bfloat16 or float32. [default: the faster one here]")
@click.option("--quick", is_flag=True, help="Half load only, unless --load is given.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_progress
def interfere(say: Say, as_json: bool, quick: bool, loads: tuple[float, ...], **options: Any) -> None:
    """Time requests with and without training at the same time, and training with and without requests.

    \b
    Requests arrive at random, whether earlier ones have been answered or not. Progress goes to stderr.
    What is measured and how: docs/bench.md.
    """
    from kt_runtime.bench.interfere.plan import HALF, LOADS, Plan
    from kt_runtime.bench.interfere.report import print_report
    from kt_runtime.bench.interfere.run import run

    result = run(Plan(loads=loads or ((HALF,) if quick else LOADS), **options), say)
    _show(result, print_report, as_json)


@command.command(name="swap")
@click.option(
    "--model", default="bench-qwen3-moe", show_default=True, help="A preset that can be made, or a directory."
)
@click.option("--layers", type=int, help="Fewer layers than the preset has.")
@click.option(
    "--size", "sizes", multiple=True, help="Of adapters that are loaded, as 10MB. [default: 10MB, 300MB, 3GB]"
)
@click.option("--rank", "ranks", type=int, multiple=True, help="Of sessions that publish. [default: 8, 64]")
@click.option("--rounds", default=3, show_default=True, help="Of every size and of every session.")
@click.option("--cycles", type=int, help="Publications that are unloaded again. [default: 1000; 100 with --quick]")
@click.option("--streams", default=8, show_default=True, help="That decode meanwhile.")
@click.option("--many-streams", default=64, show_default=True, help="That decode with the name that moves.")
@click.option("--swaps", default=10, show_default=True, help="Moves of that name.")
@click.option("--control-seconds", default=30.0, show_default=True, help="In which nothing is published.")
@click.option("--dtype", help="The server's: bfloat16 or float32. [default: the faster one here]")
@click.option("--quick", is_flag=True, help="Adapters of 10 MB and 300 MB, 100 cycles.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_progress
def swap(
    say: Say,
    as_json: bool,
    quick: bool,
    sizes: tuple[str, ...],
    ranks: tuple[int, ...],
    cycles: int | None,
    **options: Any,
) -> None:
    """Time the publication of adapters of several sizes, and the streams that decode meanwhile.

    \b
    Progress goes to stderr.
    What is measured and how: docs/bench.md.
    """
    from kt_runtime.bench.swap.plan import CYCLES, QUICK_CYCLES, QUICK_SIZES, RANKS, SIZES, Plan
    from kt_runtime.bench.swap.report import print_report
    from kt_runtime.bench.swap.run import run

    if cycles is None:
        cycles = QUICK_CYCLES if quick else CYCLES
    sizes = sizes or (QUICK_SIZES if quick else SIZES)
    result = run(Plan(sizes=sizes, ranks=ranks or RANKS, cycles=cycles, **options), say)
    _show(result, print_report, as_json)


@command.command(name="cache")
@click.option(
    "--model", default="bench-qwen3-moe", show_default=True, help="A preset that can be made, or a directory."
)
@click.option("--tokens", default=2048, show_default=True, help="Of the prefix: whole pages.")
@click.option("--page-tokens", default=64, show_default=True, help="Tokens of a page.")
@click.option("--rounds", default=5, show_default=True, help="Of every measurement.")
@click.option(
    "--bandwidth-bytes", default=256 << 20, show_default=True, help="Written and read in a round, without the server."
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    help="On the disk to be measured; a temporary one is made in it. [default: TMPDIR]",
)
@click.option("--dtype", help="The server's: bfloat16 or float32. [default: the faster one here]")
@click.option("--server/--no-server", "with_server", default=True, show_default=True, help="Also measure first tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_progress
def cache(say: Say, as_json: bool, **options: Any) -> None:
    """Time first tokens from each tier of the prefix cache, and the disk tier against plain files.

    \b
    Progress goes to stderr.
    What is measured and how: docs/bench.md.
    """
    from kt_runtime.bench.cache.plan import Plan
    from kt_runtime.bench.cache.report import print_report
    from kt_runtime.bench.cache.run import run

    plan = Plan(**options)
    result = run(plan, say)
    _show(result, print_report, as_json)


@command.command(name="serve")
@click.option(
    "--model", default="bench-qwen3-moe", show_default=True, help="A preset that can be made, or a directory."
)
@click.option("--prefill", type=int, multiple=True, help="Tokens of a prompt. [default: 512, 2048, 8192]")
@click.option("--streams", type=int, multiple=True, help="Decoded at once. [default: 1, 4, 8, 16, 32]")
@click.option("--prompt-tokens", default=128, show_default=True, help="Prompt of each stream.")
@click.option("--new-tokens", default=64, show_default=True, help="Answer of each stream.")
@click.option(
    "--adapters/--no-adapters",
    "with_adapters",
    default=True,
    show_default=True,
    help="Also decode with an adapter for each stream.",
)
@click.option("--rank", default=16, show_default=True, help="Of the adapters.")
@click.option("--dtype", help="bfloat16 or float32. [default: the faster one here]")
@click.option(
    "--sglang/--no-sglang",
    "with_sglang",
    default=True,
    show_default=True,
    help="Also measure SGLang without the native step (serve --no-step).",
)
@click.option(
    "--hugging-face/--no-hugging-face",
    "with_hugging_face",
    default=True,
    show_default=True,
    help="Also measure Hugging Face.",
)
@click.option(
    "--peer",
    type=click.Path(path_type=Path),
    metavar="PYTHON",
    help="Also measure llama.cpp: llama-cpp-python, installed for that interpreter.",
)
@click.option(
    "--gguf",
    metavar="MIX",
    help="Serve one GGUF file, which llama.cpp reads too: Q4_K_M, Q8_0 or MXFP4_MOE. Without Hugging Face.",
)
@click.option("--runs", type=int, help="Counted runs of a case. [default: 3]")
@click.option("--quick", is_flag=True, help="Less: a prompt of 512, 1 and 4 streams, one run.")
@click.option(
    "--json",
    "json_place",
    is_flag=False,
    flag_value="-",
    metavar="[FILE]",
    help="Print JSON, or write it to FILE in addition to the table.",
)
@with_progress
def serve(
    say: Say,
    quick: bool,
    json_place: str | None,
    prefill: tuple[int, ...],
    streams: tuple[int, ...],
    runs: int | None,
    **options: Any,
) -> None:
    """Time prefill and decode over HTTP against the machine's limits, SGLang, Hugging Face and llama.cpp.

    \b
    Options that name several things may be given several times. Progress goes to stderr.
    What is measured and how: docs/bench.md.
    """
    from kt_runtime.bench.serve.plan import FULL, QUICK, Plan
    from kt_runtime.bench.serve.report import print_report
    from kt_runtime.bench.serve.run import run

    sizes = QUICK if quick else FULL
    runs = sizes.runs if runs is None else runs
    plan = Plan(prefill=prefill or None, streams=streams or None, runs=runs, default_sizes=sizes, **options)
    _measure_to(json_place, lambda: run(plan, say), print_report)


@command.command(name="gpu")
@click.option(
    "--models",
    metavar="NAMES",
    help="Presets, separated by commas, made with random weights. [default: qwen3-30b-a3b,deepseek-v2-lite]",
)
@click.option("--layers", type=int, help="Fewer layers than the models have.")
@click.option("--prefill", type=int, multiple=True, help="Tokens of a prompt. [default: 512, 4096]")
@click.option("--streams", type=int, multiple=True, help="Decoded at once. [default: 1, 4, 8, 16]")
@click.option(
    "--resident",
    type=float,
    multiple=True,
    help="Share of each layer's experts on the GPU, for hot and for paged experts. [default: 0.125, 0.25, 0.5]",
)
@click.option("--sglang/--no-sglang", "with_sglang", default=True, show_default=True, help="Also measure stock SGLang.")
@click.option(
    "--hugging-face/--no-hugging-face",
    "with_hugging_face",
    default=True,
    show_default=True,
    help="Also measure Hugging Face.",
)
@click.option(
    "--training/--no-training", "with_training", default=True, show_default=True, help="Also measure training."
)
@click.option(
    "--peer",
    type=click.Path(path_type=Path),
    metavar="PYTHON",
    help="Also measure llama.cpp: llama-cpp-python, installed for that interpreter.",
)
@click.option("--runs", default=3, show_default=True, help="Counted runs of a case.")
@click.option(
    "--json",
    "json_place",
    is_flag=False,
    flag_value="-",
    metavar="[FILE]",
    help="Print JSON, or write it to FILE in addition to the tables.",
)
@with_progress
def gpu(
    say: Say,
    json_place: str | None,
    models: str | None,
    prefill: tuple[int, ...],
    streams: tuple[int, ...],
    resident: tuple[float, ...],
    **options: Any,
) -> None:
    """Time serving and training on this machine's GPU against its limits, stock SGLang, Hugging Face and llama.cpp.

    \b
    Needs a GPU, and disk and memory for the models, which are made here. Progress goes to stderr.
    What is measured and how: docs/bench.md.
    """
    from kt_runtime.bench.gpu.plan import Plan
    from kt_runtime.bench.gpu.report import print_report
    from kt_runtime.bench.gpu.run import required_accelerator, run

    given: dict[str, Any] = {"prefill": prefill, "streams": streams, "resident_shares": resident}
    given = {name: value for name, value in given.items() if value}
    if models is not None:
        given["models"] = tuple(name.strip() for name in models.split(",") if name.strip())
    plan = Plan(**given, **options)
    required_accelerator()
    _measure_to(json_place, lambda: run(plan, say), print_report)


@command.command(name="record")
@click.argument("report", type=click.Path(path_type=Path), metavar="REPORT")
@click.option(
    "--name", required=True, help="Of the file docs/measurements/NAME.json, for example 2026-11-22-zen4-cache."
)
@click.option("--title", required=True, help="Its heading on the page.")
@click.option("--command", "ran", required=True, help="The command that printed REPORT.")
@click.option("--commit", required=True, help="The commit that was measured.")
@click.option("--date", help="Of the measurement. [default: today, UTC]")
@click.option("--machine", required=True, help='A short name of the machine, for example "Zen 4 (AVX-512)".')
@click.option(
    "--hardware", help="Processors, memory, GPU. [default: the processors that REPORT names; `demo` names none]"
)
@click.option("--conditions", help="Options and state of the machine that a reader needs.")
@checkout_option
def record(report: Path, name: str, checkout: Path, **origin: str | None) -> None:
    """Add REPORT, the JSON of `bench experts`, `train`, `rl`, `interfere`, `swap`, `scale`, `serve`, `cache`, `gpu` or
    `demo`, to docs/measurements; generate the pages."""
    from kt_runtime.bench.page.checkout import MEASUREMENTS, check_is_checkout
    from kt_runtime.bench.page.report import record_report

    check_is_checkout(checkout)
    written = record_report(report, checkout / MEASUREMENTS, name, origin)
    click.echo(f"{written} is written")
    _generate(checkout)


@command.command(name="page")
@click.option("--check", is_flag=True, help="Change nothing; name the files that differ from what would be generated.")
@checkout_option
def page(check: bool, checkout: Path) -> None:
    """Generate docs/measurements.md, docs/performance.md, README.md's tables and the demo's picture from the JSON files
    in docs."""
    from kt_runtime.bench.page.checkout import check_is_checkout, stale
    from kt_runtime.errors import InvalidValueError

    check_is_checkout(checkout)
    if not check:
        _generate(checkout)
    elif old := stale(checkout):
        raise InvalidValueError(
            f"{', '.join(map(str, old))}: not what the JSON files make; run `kt-runtime bench page`"
        )


def _measure_to(
    json_place: str | None, measured: Callable[[], dict[str, Any]], print_report: Callable[[dict[str, Any]], None]
) -> None:
    """Measures, and shows the result. `json_place`: "-" prints JSON instead of tables, another name is a file's that
    gets JSON; None: tables alone."""
    from kt_runtime.files import write_json

    place = None if json_place in (None, "-") else Path(str(json_place))
    if place is not None:
        _check_writable(place)
    result = measured()
    if place is not None:
        write_json(place, result)
    _show(result, print_report, as_json=json_place == "-")


def _check_writable(place: Path) -> None:
    """Called before a run of tens of minutes instead of after it. Raises InvalidValueError."""
    directory = place.absolute().parent
    if not directory.is_dir():
        raise InvalidValueError(f"--json {place}: there is no directory {directory}")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise InvalidValueError(f"--json {place}: nothing can be written to {directory}")
    if place.is_dir():
        raise InvalidValueError(f"--json {place}: is a directory; expected a file's name")


def _generate(checkout: Path) -> None:
    from kt_runtime.bench.page.checkout import generate

    for path in generate(checkout):
        click.echo(f"{path} is written")


def _show(result: dict[str, Any], print_report: Callable[[dict[str, Any]], None], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        print_report(result)
