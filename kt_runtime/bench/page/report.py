"""The JSON of `kt-runtime bench ... --json` and of `kt-runtime demo --json`, as a measurement."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from kt_runtime.bench.options import DTYPE_BYTES
from kt_runtime.bench.page.measurement import Cell, Column, Figure, Kind, Measurement, Range, Row, Single, Table, write
from kt_runtime.bench.swap.figures import HEADINGS as SWAP_HEADINGS
from kt_runtime.errors import ConflictError, InvalidValueError
from kt_runtime.files import errors_of_path, read_regular
from kt_runtime.serve.models.checkpoint import count_parameters
from kt_runtime.serve.models.presets import is_preset, load_preset

SIGNIFICANT_DIGITS = 4
MAX_FILE_BYTES = 16 << 20
MEGA, MEBI, GIGA = Decimal(10**6), Decimal(2**20), Decimal(10**9)
PEERS = {"sglang_no_step": "SGLang without the step", "hugging_face": "Hugging Face", "llama_cpp": "llama.cpp"}
"""Peers of `bench serve` -> their names in tables. A peer without results has empty columns, so that tables of several
machines become one."""
NOT_OVER_HTTP = ("hugging_face", "llama_cpp")
GPU_LIMITS = (
    ("dram", "DRAM read", "GB/s"),
    ("to_device", "pinned host memory to the GPU", "GB/s"),
    ("to_host", "the GPU to pinned host memory", "GB/s"),
    ("device_memory", "GPU memory", "GB/s"),
    ("cpu_arithmetic", "CPU bf16", "GFLOP/s"),
    ("device_arithmetic", "GPU bf16", "GFLOP/s"),
)
"""Limits that `bench gpu` measures: the name in the report, the name on the page, and the unit there."""
GPU_SHARES = {
    "dram": "DRAM",
    "cpu_arithmetic": "CPU arithmetic",
    "to_device": "the bus",
    "device_memory": "GPU memory",
    "device_arithmetic": "GPU arithmetic",
}
NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")


def record_report(report_path: Path, directory: Path, name: str, origin: Mapping[str, str | None]) -> Path:
    """Writes the measurement `name` to `directory` and returns its path. `origin`: as in `measurement_of`, the command
    as `ran`; date and hardware may be None. Raises InvalidValueError, ConflictError if the file exists."""
    path = directory / f"{name}.json"
    if not NAME.fullmatch(name):
        raise InvalidValueError(
            f"--name {name!r}: allowed are lower-case letters, digits, '-' and '.', as 2026-11-22-zen4-cache"
        )
    if path.exists():
        raise ConflictError(f"{path} exists already; choose another --name")
    with errors_of_path(report_path, "read"):
        report = parse_report(read_regular(report_path, MAX_FILE_BYTES), str(report_path))
    facts = dict(origin)
    facts["command"] = facts.pop("ran")
    facts["date"] = facts["date"] or datetime.now(UTC).date().isoformat()
    facts["hardware"] = facts["hardware"] or _hardware(report, report_path)
    write(path, measurement_of(report, **facts))
    return path


def measurement_of(report: Mapping[str, Any], **origin: Any) -> Measurement:
    """`report`: read with `parse_report`. `origin`: title, date, machine, hardware, command, commit and the like, as in
    `Measurement`. Raises InvalidValueError for JSON of no known bench and for a report that lacks a field."""
    for field, (kind, convert) in _KINDS.items():
        if field in report:
            try:
                figures, tables = convert(report)
                misses = _misses(report)
            except (KeyError, TypeError) as error:
                raise InvalidValueError(f"report of `bench {kind}`: lacks the field {error} (docs/bench.md)") from None
            return Measurement(kind=kind, figures=figures, tables=tables, misses=misses, **origin)
    raise InvalidValueError(
        f"report: has the fields {', '.join(report) or '(none)'}; a report of `kt-runtime bench` has one of "
        f"{', '.join(_KINDS)} (docs/bench.md)"
    )


def parse_report(text: bytes, where: str) -> dict[str, Any]:
    """A report's JSON with its numbers as decimals. Raises InvalidValueError."""
    try:
        report = json.loads(text, parse_float=Decimal, parse_int=Decimal)
    except ValueError as error:
        raise InvalidValueError(f"{where}: {error}") from None
    if not isinstance(report, dict):
        raise InvalidValueError(f"{where}: holds no JSON object; a report of `kt-runtime bench ... --json` is one")
    return report


def _hardware(report: Mapping[str, Any], where: Path) -> str:
    try:
        return f"{report['machine']['processors']} processors of {report['machine']['cpu']}"
    except KeyError:
        raise InvalidValueError(f"{where}: names no machine; name the hardware with --hardware") from None


def _rounded(value: Decimal | None, per: Decimal | int = 1) -> Decimal | None:
    """`value / per` with the digits that mean something; a whole number stays as it is."""
    if value is None:
        return None
    scaled = value / per
    if scaled == scaled.to_integral_value():
        return scaled.to_integral_value()
    decimals = max(SIGNIFICANT_DIGITS - 1 - scaled.adjusted(), 0)
    return scaled.quantize(Decimal(1).scaleb(-decimals))


def _experts(report: Mapping[str, Any]) -> tuple[list[Single], list[Table]]:
    limits = [
        Single(f"{each['isa']}, {each['threads']} threads: {what}", _rounded(each[field], GIGA), unit)
        for each in report["machine"]["by_threads"]
        for field, what, unit in (
            ("dram_bytes_per_s", "DRAM read", "GB/s"),
            ("bf16_flops", "bf16 peak", "GFLOP/s"),
            ("int8_ops", "int8 peak", "Gop/s"),
        )
    ]
    peers = list(dict.fromkeys(name for row in report["rows"] for name in row["peers"]))
    # Reports of earlier versions lack the reads between a row's calls.
    reads = [
        (name, title, unit, per)
        for name, title, unit, per in (
            ("dram_bytes_per_s", "DRAM read beside", "GB/s", GIGA),
            ("dram_share", "share of DRAM", "ratio", 1),
            ("dram_share_least", "slowest call", "ratio", 1),
        )
        if all(name in row for row in report["rows"])
    ]
    figures = [Column("time", "ms"), Column("share of the limit", "ratio"), Column("error", "relative")]
    figures += [Column(title, unit) for _, title, unit, _ in reads]
    figures += [Column(name, "peer's time / kt-runtime's") for name in peers]
    rows = [
        Row(
            [row["shape"], row["format"], row["isa"], str(row["threads"]), str(row["tokens"]), _pass(row)],
            [
                *(_rounded(row[field]) for field in ("ms", "limit_ratio", "rel_error")),
                *(_rounded(row[name], per) for name, _, _, per in reads),
                *(_rounded(row["peers"][name], row["ms"]) if name in row["peers"] else None for name in peers),
            ],
        )
        for row in report["rows"]
    ]
    loads = [
        Row(
            [load["shape"], load["format"], load["isa"], str(load["threads"])],
            [
                _rounded(load["resident_bytes"], GIGA),
                _rounded(load["resident_bytes"], load["weight_bytes"]),
                _rounded(load["peak_extra_ratio"]),
                _rounded(load["seconds"]),
            ],
        )
        for load in report["loads"]
    ]
    load_columns = [Column("resident", "GB"), Column("resident / weights", "ratio")]
    load_columns += [Column("peak extra / weights", "ratio"), Column("loading", "s")]
    case = ["shape", "format", "kernels", "threads"]
    return limits, [
        Table("cases", [*case, "tokens", "pass"], figures, rows),
        Table("loading", case, load_columns, loads),
    ]


def _pass(row: Mapping[str, Any]) -> str:
    return f"{row['op'].replace('_', ' and ')}, {row['activations']}" if row["activations"] else str(row["op"])


def _training(report: Mapping[str, Any]) -> tuple[list[Single], list[Table]]:
    settings = report["training"]
    figures = [
        Single(name.replace("_", " "), _rounded(settings[name]), unit)
        for name, unit in (("sequences", "sequences"), ("tokens", "tokens"), ("steps", "steps"), ("rank", "LoRA rank"))
    ]
    columns = [Column("kt-runtime", "tokens/s"), Column("Hugging Face + PEFT", "tokens/s"), Column("ratio", "ratio")]
    columns += [Column("peak memory", "GB"), Column("peer's peak memory", "GB")]
    rows = [
        Row(
            [settings["model"], row["targets"], row["activations"]],
            [
                *(_rounded(row[field]) for field in ("tokens_per_s", "hf_peft_tokens_per_s", "ratio")),
                *(_rounded(row[field], GIGA) for field in ("peak_bytes", "hf_peft_peak_bytes")),
            ],
        )
        for row in report["rows"]
    ]
    return figures, [Table("steps", ["model", "LoRA on", "activations"], columns, rows)]


def _rl(report: Mapping[str, Any]) -> tuple[list[Single], list[Table]]:
    settings, runs = report["rl"], report["runs"]
    figures = [
        Single(what, settings[name], unit)
        for name, what, unit in (
            ("prompts", "prompts of a step", "prompts"),
            ("generations", "answers to a prompt", "answers"),
            ("prompt_tokens", "prompt", "tokens"),
            ("new_tokens", "answer", "tokens"),
            ("rank", "rank of the adapter", "LoRA rank"),
        )
    ]
    figures += [
        Single("step, median", _rounded(report["step_s"]), "s"),
        Single("step, all runs", _spread(runs["step_s"]), "s"),
        *(Single(f"share of a step: {name}", _rounded(share), "ratio") for name, share in report["share"].items()),
        Single("publish to first token, median", _rounded(report["publish_to_first_token_ms"]), "ms"),
        Single("publish to first token, all rounds", _spread(runs["publish_to_first_token_ms"]), "ms"),
        Single("decode step of a single stream", _rounded(report["decode_step_ms"]), "ms"),
        Single(f"{settings['group']} answers to one prompt", _rounded(report["group_tokens_per_s"]), "tokens/s"),
        Single("a single answer", _rounded(report["single_tokens_per_s"]), "tokens/s"),
        Single("group / single, median", _rounded(report["group_speedup"]), "ratio"),
        Single("group / single, all rounds", _spread(runs["group_speedup"]), "ratio"),
        Single("largest kl/k3 of a step", _rounded(report["largest_k3"]), "nats"),
    ]
    return figures, []


def _further_kept(report: Mapping[str, Any]) -> list[Single]:
    """Training's speed by the other readings of what is left over. Older records lack them."""
    names = {
        "training_kept_of_idle": "training at half load, of its measured idle time without training",
        "training_kept_of_alone": "training at half load, of its speed alone",
    }
    return [Single(what, _rounded(report[key]), "ratio") for key, what in names.items() if key in report]


def _interfere(report: Mapping[str, Any]) -> tuple[list[Single], list[Table]]:
    settings, targets = report["interfere"], ("tpot_target_ms", "ttft_target_ms")
    kept = report["training_kept"]
    figures = [
        Single("arrivals at half load", _rounded(settings["seconds"]), "s"),
        Single("capacity", _rounded(report["capacity_requests_per_s"]), "requests/s"),
        Single("target for the time per output token", _rounded(report[targets[0]]), "ms"),
        Single("target for the time to the first token", _rounded(report[targets[1]]), "ms"),
        Single("time per output token at half load, p99, training / idle", _rounded(report["p99_tpot_ratio"]), "ratio"),
        Single("training at half load, of what is left over", _rounded(kept), "ratio"),
        *_further_kept(report),
        Single(
            "training with targets without requests / without targets",
            _rounded(report["training_alone_share"]),
            "ratio",
        ),
        Single("goodput at half load / that of whole calls", _rounded(report["goodput_ratio"]), "ratio"),
        Single(
            "training with whole calls at half load, of that with targets",
            _rounded(report["plain_training_share"]),
            "ratio",
        ),
        Single("training alone", _rounded(report["training_alone_tokens_per_s"]), "tokens/s"),
    ]
    columns = [Column(f"{name} {share}", "ms") for name in ("TTFT", "TPOT") for share in ("p50", "p95", "p99")]
    columns += [Column("in time", "requests/s"), Column("training", "tokens/s")]
    rows = [
        Row(
            [settings["model"], f"{row['load']:g}", row["mode"].replace("_", " ")],
            [
                *(_rounded(row[name][share]) for name in ("ttft_ms", "tpot_ms") for share in ("p50", "p95", "p99")),
                _rounded(row["goodput_per_s"]),
                _rounded(row["training_tokens_per_s"]),
            ],
        )
        for row in report["rows"]
    ]
    return figures, [Table("loads", ["model", "load", "beside requests"], columns, rows)]


def _serving(report: Mapping[str, Any]) -> tuple[list[Single], list[Table]]:
    settings, limits, rows = report["serving"], report["machine"]["limits"], report["rows"]
    figures = [
        Single(what, settings[name], unit)
        for name, what, unit in (
            ("prompt_tokens", "prompt of a decoding stream", "tokens"),
            ("new_tokens", "answer of a decoding stream", "tokens"),
            ("runs", "runs of a case", "runs"),
            ("rank", "rank of the adapters", "LoRA rank"),
        )
    ]
    if limits is not None:
        figures.append(Single("limits: DRAM read", _rounded(limits["dram_bytes_per_s"], GIGA), "GB/s"))
        figures.append(Single("limits: bf16 peak", _rounded(limits["bf16_flops"], GIGA), "GFLOP/s"))
    for name, peer in PEERS.items():
        if shares := [share for row in rows if (share := row["same_tokens"].get(name)) is not None]:
            figures.append(Single(f"share of the server's tokens that {peer} chooses too", _spread(shares), "ratio"))
    figures += [figure for row in rows for figure in _step_figures(row)]
    figures += _logprob_figures(report)
    columns = [Column("kt-runtime, median", "tokens/s"), Column("kt-runtime, all runs", "tokens/s")]
    columns += [Column("limit", "tokens/s"), Column("median / limit", "ratio")]
    columns += [Column(peer, "tokens/s") for peer in PEERS.values()]
    columns += [Column(f"kt-runtime / {peer}", "ratio") for peer in PEERS.values()]
    table_rows = [
        Row([settings["model"], *_serving_case(row)], _serving_cells(row), row.get("problem")) for row in rows
    ]
    notes = [f"{PEERS[name]}: {_facts(facts)}." for name, facts in report["peers"].items()]
    weights = settings["dtype"]
    if file := settings.get("gguf"):
        weights = f"{file['mix']} (one GGUF file, {_rounded(file['bytes'], GIGA)} GB; activations in {weights})"
    title = f"{settings['model']} in {weights}, over HTTP; peers in their own processes"
    rates = Table("rates", ["model", "case", "size"], columns, table_rows, title, notes)
    return figures, [rates, _formats(settings, rows)]


def _formats(settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Table:
    """One row: the base's medians of a prompt of 512 tokens, of 1 and of 8 streams, and the memory of the weights."""
    found = {_serving_case(row)[1]: row for row in rows if not row["adapters"]}
    cases = {"prompt of 512": "512 tokens", "1 stream": "1 streams", "8 streams": "8 streams"}
    medians = [found[size]["tokens_per_s"] if size in found else None for size in cases.values()]
    peers = [found[size]["peers"].get("llama_cpp") if size in found else None for size in cases.values()]
    ratios: list[Figure] = [_rounded(a, b) if a and b else None for a, b in zip(medians, peers, strict=True)]
    model, dtype, file = str(settings["model"]), str(settings["dtype"]), settings.get("gguf")
    size_bytes = file["bytes"] if file else None
    if size_bytes is None and is_preset(model):
        size_bytes = Decimal(count_parameters(load_preset(model).config).total * DTYPE_BYTES[dtype])
    columns = [Column("weights", "GB"), *(Column(name, "tokens/s") for name in cases)]
    columns.append(Column("kt-runtime / llama.cpp", list(cases)))
    cells: list[Cell] = [_rounded(size_bytes, GIGA), *map(_rounded, medians), ratios if any(ratios) else None]
    return Table("formats", ["model", "format"], columns, [Row([model, file["mix"] if file else dtype], cells)])


def _step_figures(row: Mapping[str, Any]) -> list[Single]:
    """Where a token's time goes. Older reports have no `step`, or no head in it."""
    if (step := row.get("step")) is None:
        return []
    streams = f"{row['streams']} stream{'s' if row['streams'] > 1 else ''}"
    rest = "neither step, head nor sampling (scheduling, HTTP)"
    if "head_ms" not in step:
        rest = "neither step nor sampling (head, scheduling, HTTP)"
    figures = [
        Single(f"the native step without HTTP, {streams}, per token", _rounded(step["ms"]), "ms"),
        Single(f"the native step without HTTP, {streams}: limit / time", _rounded(step["limit_share"]), "ratio"),
        Single(f"sampling, {streams}, per token", _rounded(step["sampling_ms"]), "ms"),
        Single(f"{rest}, {streams}, per token", _rounded(step["rest_ms"]), "ms"),
    ]
    if "head_ms" in step:
        figures.append(Single(f"head, {streams}, per token", _rounded(step["head_ms"]), "ms"))
        figures += [
            Single(f"a step of {PEERS[name]} / kt-runtime's step and head, {streams}", _rounded(ratio), "ratio")
            for name, ratio in step["peers"].items()
            if name in NOT_OVER_HTTP
        ]
    return figures


def _logprob_figures(report: Mapping[str, Any]) -> list[Single]:
    """Older reports have no `logprobs`."""
    found = report.get("logprobs") or {"peers": {}, "format": None}
    named = {f"{PEERS[name]}'s log-probabilities less kt-runtime's": each for name, each in found["peers"].items()}
    named["llama.cpp's log-probabilities of the quantized file less those of its bf16 weights"] = found["format"]
    return [
        Single(f"{what}, mean size", _rounded(each["mean"]), "nats") for what, each in named.items() if each is not None
    ]


def _serving_case(row: Mapping[str, Any]) -> list[str]:
    size = f"{row['tokens']} tokens" if row["case"] == "prefill" else f"{row['streams']} streams"
    return [f"{row['case']}, an adapter each" if row["adapters"] else str(row["case"]), size]


def _serving_cells(row: Mapping[str, Any]) -> list[Cell]:
    rate = row["tokens_per_s"]
    peers = [row["peers"].get(name) for name in PEERS]
    return [
        _rounded(rate),
        _spread(row["tokens_per_s_runs"]) if row["tokens_per_s_runs"] else None,
        _rounded(row["limit_tokens_per_s"]),
        _rounded(row["limit_share"]),
        *map(_rounded, peers),
        *(None if peer is None else _rounded(rate, peer) for peer in peers),
    ]


def _facts(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)


def _cache(report: Mapping[str, Any]) -> tuple[list[Single], list[Table]]:
    settings, files, tables = report["cache"], report["files"], []
    figures = [
        Single("prefix", _rounded(settings["tokens"]), "tokens"),
        Single("disk tier over a plain file: reading", _rounded(report["disk_read_ratio"]), "ratio"),
        Single("disk tier over a plain file: writing", _rounded(report["disk_write_ratio"]), "ratio"),
        Single("reading a plain file", _rounded(files["bytes_per_s"]["plain_read"], GIGA), "GB/s"),
        Single("writing a plain file", _rounded(files["bytes_per_s"]["plain_write"], GIGA), "GB/s"),
    ]
    if report["ttft_ms"] is not None:
        figures.append(Single("cold / disk", _rounded(report["cold_to_disk"]), "ratio"))
        rows = [
            Row([source.replace("_", " ")], [_rounded(middle), _spread(report["ttft_ms_samples"][source])])
            for source, middle in report["ttft_ms"].items()
        ]
        columns = [Column("first token, median", "ms"), Column("all rounds", "ms")]
        title = f"{settings['model']} in {settings['dtype']}"
        tables.append(Table("first-token", ["prefix from"], columns, rows, title))
    return figures, tables


def _gpu(report: Mapping[str, Any]) -> tuple[list[Single], list[Table]]:
    machine, limits = report["machine"], report["machine"]["limits"]
    figures = [Single(f"limits: {what}", _rounded(limits[name], GIGA), unit) for name, what, unit in GPU_LIMITS]
    figures.append(Single("GPU memory", _rounded(machine["gpu_bytes"], GIGA), "GB"))
    for bar in report["bars"]:
        note = f"at least {bar['least']}"
        figures.append(Single(f"{bar['model']}: {bar['what']}", _rounded(bar["value"]), "ratio", note))
    columns = [Column("median", "tokens/s"), Column("all runs", "tokens/s")]
    columns += [Column(f"share of {what}", "ratio") for what in GPU_SHARES.values()] + [Column("GPU memory", "GB")]
    rows = [
        Row([row["model"], row["engine"], row["setting"], row["case"], _gpu_size(row)], _gpu_cells(row), row["problem"])
        for row in report["rows"]
    ]
    notes = [
        f"{model}, {name}: {_facts(facts)}."
        for model, found in report["peers"].items()
        for name, facts in found.items()
    ]
    software = f"driver {machine['driver'] or 'unknown'}, torch {machine['torch']}"
    title = f"{machine['gpu']}, {software}; servers over HTTP, Hugging Face and llama.cpp in their own processes"
    case = ["model", "engine", "experts", "case", "size"]
    return figures, [Table("rates", case, columns, rows, title, notes)]


def _gpu_size(row: Mapping[str, Any]) -> str:
    return f"{row['streams']} streams" if "streams" in row else f"{row['tokens']} tokens"


def _gpu_cells(row: Mapping[str, Any]) -> list[Cell]:
    runs = row["tokens_per_s_runs"]
    shares = [_rounded(row["shares"].get(name)) for name in GPU_SHARES]
    return [
        _rounded(row["tokens_per_s"]),
        _spread(runs) if runs else None,
        *shares,
        _rounded(row["device_bytes"], GIGA),
    ]


def _misses(report: Mapping[str, Any]) -> list[str]:
    """Bars of `bench gpu` and `bench scale` that were measured and not met; the other reports have none."""
    if "scale" in report:
        return _missed_of_scale(report)
    return [
        f"{bar['model']}: {bar['what']}: {_rounded(bar['value'])}, at least {bar['least']} is wanted."
        for bar in report.get("bars", [])
        if bar["is_met"] is False
    ]


def _missed_of_scale(report: Mapping[str, Any]) -> list[str]:
    missed = []
    if "rounds" in report and not report["within_bar"]:
        longest, bar = _rounded(report["worst_last_first_token_ms"]), _rounded(report["bar_ms"])
        missed.append(f"publish to the last replica's first token: {longest} ms, at most {bar} ms is wanted.")
    if ranks := report.get("ranks"):
        missed += [
            f"{ranks['ranks']} ranks, {row['streams']} streams: {_rounded(row['ratio'])} of one process, at least "
            f"{ranks['bar']} is wanted."
            for row in ranks["rows"]
            if row["ratio"] < ranks["bar"]
        ]
        memory = ranks.get("memory", {"bars": {}})
        missed += [
            f"{ranks['ranks']} ranks, memory {moment.replace('_', ' ')}: {_rounded(memory['of_weights'][moment])} of "
            f"the weights, at most {bar} is wanted."
            for moment, bar in memory["bars"].items()
            if memory["of_weights"][moment] > bar
        ]
    return missed


def _spread(samples: list[Decimal]) -> Cell:
    least, most = _rounded(min(samples)), _rounded(max(samples))
    assert least is not None and most is not None
    return Range(least, most)


def _swap(report: Mapping[str, Any]) -> tuple[list[Single], list[Table]]:
    settings, growth = report["swap"], report["rss_growth_bytes"]
    figures = [
        Single("longest stall of a stream, of the case nearest to its bar", _rounded(report["longest_stall_ms"]), "ms"),
        Single("decode step of that case", _rounded(report["decode_step_ms"]), "ms"),
        Single("longest stall in the median of rounds", _rounded(report["median_stall_ms"]), "ms"),
        Single("requests failed", report["streams_failed"], "requests"),
        Single("publications that were unloaded again", settings["cycles"], "cycles"),
        Single("memory that grew after the first hundred of them", _rounded(growth, MEBI), "MiB"),
    ]
    columns = [Column("adapter", "MB"), *(Column(heading, "ms") for heading in SWAP_HEADINGS.values())]
    rows = [
        Row(
            [row["what"], f"{row['rank']}, {row['targets']}", str(row["streams"])],
            [_rounded(row["adapter_bytes"], MEGA), *(_rounded(row[name]) for name in SWAP_HEADINGS)],
        )
        for row in report["rows"]
    ]
    return figures, [Table("adapters", ["what", "rank and targets", "streams"], columns, rows)]


def _scale(report: Mapping[str, Any]) -> tuple[list[Single], list[Table]]:
    """A report has replicas, ranks, or both."""
    settings, figures, tables = report["scale"], [], []
    if "rounds" in report:
        longest = [max(each["first_token_ms"]) for each in report["rounds"]]
        figures = [
            Single("adapter", _rounded(settings["adapter_bytes"], MEGA), "MB"),
            Single("replicas of one registry", settings["replicas"], "servers"),
            Single("streams of each replica", settings["streams"], "streams"),
            Single("publish to the last replica's first token, median", _rounded(report["last_first_token_ms"]), "ms"),
            Single("publish to the last replica's first token, all rounds", _spread(longest), "ms"),
            Single("requests of the streams that failed", report["requests_failed"], "requests"),
        ]
    if "ranks" in report:
        tables.append(_ranks(report["ranks"], settings["dtype"]))
        if memory := report["ranks"].get("memory"):  # reports of older versions have none
            tables.append(_memory_of_ranks(report["ranks"]["model"], memory))
    return figures, tables


def _memory_of_ranks(model: str, memory: Mapping[str, Any]) -> Table:
    moments = {"loaded": "loaded", "between_calls": "between calls", "at_peak": "at the peak"}
    shares = {"of_weights": "weights", "of_weights_and_cache": "weights and KV cache"}
    columns = [Column(f"{said}, of {share}", "ratio") for said in moments.values() for share in shares.values()]
    rows = [
        Row([model, str(row["rank"])], [_rounded(row[share][moment]) for moment in moments for share in shares])
        for row in memory["rows"]
    ]
    title = f"Memory of a rank, less that of a rank of {memory['base_model']}, over its share of the model"
    return Table("rank memory", ["model", "rank"], columns, rows, title)


def _ranks(found: Mapping[str, Any], dtype: str) -> Table:
    columns = [Column(f"{who}, {which}", "tokens/s") for who in ("ranks", "one process") for which in ("median", "all")]
    columns += [Column("ratio", "ratio"), Column("step of the ranks", "ms"), Column("step of one process", "ms")]
    columns += [Column("equal tokens", "ratio")]
    rows = [
        Row(
            [found["model"], str(found["ranks"]), str(row["streams"])],
            [
                _rounded(row["tokens_per_s"]),
                _spread(row["tokens_per_s_runs"]),
                _rounded(row["one_process_tokens_per_s"]),
                _spread(row["one_process_tokens_per_s_runs"]),
                *(_rounded(row[name]) for name in ("ratio", "step_ms", "one_process_step_ms", "same_tokens")),
            ],
        )
        for row in found["rows"]
    ]
    title = f"Decoding over HTTP in {dtype}: ranks of one core each, and one process with as many cores"
    return Table("ranks", ["model", "ranks", "streams"], columns, rows, title)


def _demo(report: Mapping[str, Any]) -> tuple[list[Single], list[Table]]:
    figures = [
        Single("from the publish call to the moved name", _rounded(report["publish_ms"]), "ms"),
        Single(
            "from the end of the last optimizer step to the first token of the new version",
            _rounded(report["optim_to_first_token_ms"]),
            "ms",
        ),
        Single("streams answered meanwhile", report["streams_total"], "streams"),
        Single("streams failed", report["streams_failed"], "streams"),
        Single("loss of the first and the last training step", _first_and_last(report), "nats"),
        Single("resident memory while serving", _rounded(report["rss_serving_bytes"], GIGA), "GB"),
        Single("peak resident memory while training", _rounded(report["rss_training_bytes"], GIGA), "GB"),
        Single("weights shared by serving and training", report["weights_shared_bytes"], "bytes"),
        Single("weights copied for training", report["weights_copied_bytes"], "bytes"),
    ]
    return figures, []


def _first_and_last(report: Mapping[str, Any]) -> Cell:
    return [_rounded(report["loss_first"]), _rounded(report["loss_last"])]


_KINDS: dict[str, tuple[Kind, Callable[[Mapping[str, Any]], tuple[list[Single], list[Table]]]]] = {
    "loads": ("experts", _experts),
    "training": ("training", _training),
    "rl": ("rl", _rl),
    "interfere": ("interfere", _interfere),
    "swap": ("swap", _swap),
    "scale": ("scale", _scale),
    "serving": ("serving", _serving),
    "cache": ("cache", _cache),
    "gpu": ("gpu", _gpu),
    "publish_ms": ("demo", _demo),
}
"""A field of this bench's report, the first that fits -> the measurement's kind and the conversion."""
