"""`kt-runtime models`: the presets, what they need, and checkpoints made from them."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from kt_runtime.errors import ConflictError, KtError, NotFoundError
from kt_runtime.families import family_for
from kt_runtime.serve.memory.machine import has_gpu
from kt_runtime.serve.memory.plan import expert_formats, format_bytes, layer_bytes
from kt_runtime.serve.memory.server import least_bytes, plan_server, with_lora_rank
from kt_runtime.serve.models.checkpoint import BF16_BYTES, count_parameters, format_count
from kt_runtime.serve.models.checkpoint_files import check_checkpoint, read_config
from kt_runtime.serve.models.families import CHECKS, FORMAT_CHECKS, family_rows
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.presets import is_preset, load_preset, preset_names
from kt_runtime.serve.models.report import find_preset, locate, models_directory, not_found_message
from kt_runtime.serve.options.named import ServeOptions

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(name="models", help=__doc__, invoke_without_command=True)
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    if ctx.invoked_subcommand is not None:
        return
    with_gpu = has_gpu()
    rows = [_summary(name) | {"memory_bytes": _least_bytes(name, with_gpu)} for name in preset_names()]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    console, families = Console(), family_rows()
    console.print(_presets_table(rows, [family["family"] for family in families]))
    console.print(_verified_table(families))
    console.print(
        "`kt-runtime models families` says what each family is, `models formats` in which formats weights may be, "
        "`models show NAME` what a model takes on each device.",
        highlight=False,
    )


def _presets_table(rows: list[dict[str, Any]], families: list[str]) -> Table:
    """Presets by family."""
    names = ("total", "active", "experts", "memory", "here")
    table = Table(
        Column("family, presets", no_wrap=True),
        *(Column(name, no_wrap=True) for name in names),
        title="families and presets: parameters, format of the experts, the least memory of a server",
    )
    for family in families:
        table.add_section()
        table.add_row(f"[bold]{family}[/bold]")
        for row in (row for row in rows if row["family"] == family):
            table.add_row(
                f"  {row['name']}",
                format_count(row["parameters_total"]),
                format_count(row["parameters_active"]),
                row["expert_format"],
                format_bytes(row["memory_bytes"]),
                "yes" if row["directory"] else "make" if row["is_made"] else "no",
            )
    return table


@command.command(name="families")
@json_option
def families_command(as_json: bool) -> None:
    """The families of models: what each is, and what has been verified of them."""
    rows = family_rows()
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table(Column("family", no_wrap=True), "attention", "router", "experts", "presets", title="model families")
    for row in rows:
        table.add_row(row["family"], row["attention"], row["router"], row["experts"], ", ".join(row["presets"]))
    console = Console()
    console.print(table)
    console.print(_verified_table(rows))


def _verified_table(rows: list[dict[str, Any]]) -> Table:
    """`rows`: of `family_rows`."""
    verified = _checks_table("of every family")
    for check in CHECKS:
        without = [row["family"] for row in rows if check.name not in row["verified"]]
        but = f"; not of {', '.join(without)}" if without else ""
        verified.add_row(check.name, check.claim + but, check.tests)
    return verified


def _checks_table(of_what: str) -> Table:
    return Table(Column("verified", no_wrap=True), of_what, Column("by", overflow="fold"))


@command.command(name="formats")
@json_option
def formats_command(as_json: bool) -> None:
    """The formats of routed experts: each is served and trained on as it is stored (docs/formats.md)."""
    from kt_runtime.experts.formats import CHECKPOINT_FORMATS  # with torch

    if as_json:
        click.echo(json.dumps([dataclasses.asdict(row) for row in CHECKPOINT_FORMATS], indent=2))
        return
    table = Table(Column("quant_method", no_wrap=True), "weights", "experts in memory", title="weight formats")
    for row in CHECKPOINT_FORMATS:
        table.add_row(row.method, row.weights, row.experts)
    verified = _checks_table("of every format")
    for check in FORMAT_CHECKS:
        verified.add_row(check.name, check.claim, check.tests)
    console = Console()
    console.print(table)
    console.print(verified)


@command.command()
@click.argument("name")
@click.argument("directory", type=click.Path(path_type=Path), required=False)
@click.option("--seed", default=0, show_default=True, help="Of the random weights.")
@click.option("--force", is_flag=True, help="Replace DIRECTORY if it exists.")
@json_option
def make(name: str, directory: Path | None, seed: int, force: bool, as_json: bool) -> None:
    """Write a checkpoint of preset NAME with random weights to DIRECTORY.

    Without DIRECTORY it is written where `--model NAME` finds it.
    """
    preset = load_preset(name)
    target = directory if directory is not None else models_directory() / preset.name
    if os.path.lexists(target) and not force:
        raise ConflictError(f"{target} exists already; choose another name, or pass --force")
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(preset.name)
        written = make_model(
            preset,
            target,
            seed,
            replace=force,
            progress=lambda done_bytes, total_bytes: bar.update(task, completed=done_bytes, total=total_bytes),
        )
    answer = {"name": preset.name, "directory": str(written.resolve()), "seed": seed}
    click.echo(json.dumps(answer) if as_json else f"{preset.name} is in {written}")


@command.command()
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """What NAME is, needs, and whether it can be used. A preset, a directory, or an entry of the Hugging Face cache."""
    details = describe(name)
    if as_json:
        click.echo(json.dumps(details, indent=2))
        return
    console = Console()
    facts = Table(show_header=False)
    for key in ("name", "description", "note", "hub_ids", "family", "directory", "problem"):
        if details.get(key):
            value = details[key]
            facts.add_row(key.replace("_", " "), ", ".join(value) if isinstance(value, list) else str(value))
    facts.add_row("experts", details["expert_format"])
    facts.add_row("parameters", format_count(details["parameters_total"]))
    facts.add_row("active per token", format_count(details["parameters_active"]))
    console.print(facts)
    console.print(_memory_table(details))


def _memory_table(details: dict[str, Any]) -> Table:
    given = details["memory_options"]
    table = Table(
        Column("memory that `serve` plans for", no_wrap=True),
        "on",
        Column("needed", no_wrap=True),
        title=f"--max-total-tokens {given['max_total_tokens']}, --lora-slots {given['lora_slots']}, "
        f"--max-lora-rank {given['max_lora_rank']}, no cache tiers",
    )
    for need in details["memory"]:
        table.add_row(need["what"], need["device"].upper(), format_bytes(need["size_bytes"]))
    table.add_section()
    for device, sizes in details["devices"].items():
        table.add_row("in all", device.upper(), format_bytes(sizes["needed_bytes"]))
        table.add_row("free now", device.upper(), format_bytes(sizes["free_bytes"]))
    return table


def describe(name: str) -> dict[str, Any]:
    """Raises NotFoundError when `name` is neither a preset nor found on this machine."""
    preset = load_preset(name) if is_preset(name) else None
    directory, places = locate(name, preset)
    if preset is not None:
        config, details = preset.config, _summary(preset.name) | {"note": preset.note}
    elif directory is not None:
        config = read_config(directory)
        details = {"name": name, "directory": str(directory)} | _sizes(config)
    else:
        raise NotFoundError(not_found_message(name, preset, places))
    details["problem"] = _problem(directory) if directory is not None else None
    options = with_lora_rank(ServeOptions(model=name, lora_rank_may_be_lower=True), config, name)
    plan, free_bytes = plan_server(options, config, name)
    needs = [{"what": need.what, "device": need.device, "size_bytes": need.size_bytes} for need in plan.needs]
    return details | {
        "memory": needs,
        "memory_options": {
            "max_total_tokens": options.max_total_tokens,
            "lora_slots": options.lora_slots,
            "max_lora_rank": options.max_lora_rank,
        },
        "memory_bytes": plan.total_bytes("cpu"),
        "memory_free_bytes": free_bytes["cpu"],
        "devices": {
            device: {"needed_bytes": plan.total_bytes(device), "free_bytes": free_bytes.get(device, 0)}
            for device in plan.devices()
        },
        "config": config,
    }


def _least_bytes(name: str, with_gpu: bool) -> int:
    return least_bytes(load_preset(name).config, name, with_gpu=with_gpu)


def _summary(name: str) -> dict[str, Any]:
    preset = load_preset(name)
    directory = find_preset(preset)
    return {
        "name": preset.name,
        "description": preset.description,
        "hub_ids": list(preset.hub_ids),
        "is_made": preset.is_made,
        "directory": str(directory) if directory else None,
    } | _sizes(preset.config)


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    counts = count_parameters(config)
    held, _ = expert_formats(config, None)
    experts_bytes = len(family_for(config).moe_layers(config)) * layer_bytes(config, held)
    return {
        "family": family_for(config).name,
        "parameters_total": counts.total,
        "parameters_active": counts.active,
        "bf16_bytes": counts.total * BF16_BYTES,
        "expert_format": held.name,
        "weights_bytes": counts.dense * BF16_BYTES + experts_bytes,
    }


def _problem(directory: Path) -> str | None:
    try:
        check_checkpoint(directory)
    except KtError as error:
        return str(error)
    return None
