"""`kt-runtime bench scale`."""

from __future__ import annotations

import json
from typing import Any

import click

from kt_runtime.cli.interrupts import Say, with_progress


@click.command(name="scale")
@click.option("--model", default="tiny-qwen3-moe", show_default=True, help="A preset that can be made, or a directory.")
@click.option("--layers", type=int, help="Fewer layers than the preset has.")
@click.option("--replicas", default=3, show_default=True, help="Servers of one registry, all on this machine; 0: none.")
@click.option("--size", default="10MB", show_default=True, help="Of the adapters that are published.")
@click.option("--rounds", default=5, show_default=True, help="Publications that count.")
@click.option("--streams", default=0, show_default=True, help="Of each replica, that use the name meanwhile.")
@click.option("--dtype", help="The servers': bfloat16 or float32. [default: the faster one here]")
@click.option(
    "--ranks",
    default=0,
    show_default=True,
    help="Also decode on so many ranks of one core each, and in one process with as many cores; 0: not.",
)
@click.option("--rank-model", default="bench-qwen3-moe", show_default=True, help="Of the ranks.")
@click.option("--rank-streams", type=int, multiple=True, help="Decoded at once. [default: 1, 8]")
@click.option("--rank-runs", default=3, show_default=True, help="Counted runs of a case.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_progress
def scale(say: Say, as_json: bool, rank_streams: tuple[int, ...], **options: Any) -> None:
    """Time from a publication on one server to the first token of the last replica of its registry; decoding on ranks.

    \b
    Progress goes to stderr.
    What is measured and how: docs/scale.md.
    """
    from kt_runtime.bench.scale.plan import Plan
    from kt_runtime.bench.scale.report import print_report
    from kt_runtime.bench.scale.run import run

    if rank_streams:
        options["rank_streams"] = rank_streams
    result = run(Plan(**options), say)
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        print_report(result)
