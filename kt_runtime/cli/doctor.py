"""`kt-runtime doctor`: what this machine can do, and what is missing. Exit status 1 when it can't serve."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kt_runtime.cli import machine
from kt_runtime.cli.connection import ServerAPI, server_options, server_url
from kt_runtime.errors import KtError, ServerUnreachableError
from kt_runtime.serve.memory.plan import PROCESSES_BYTES, format_bytes
from kt_runtime.sglang_patch import plugin

STATUS_TIMEOUT_S = 5.0


@click.command(name="doctor", help=__doc__)
@click.option("--symbols", is_flag=True, help="List every SGLang symbol that the plugin touches instead.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@server_options
@click.pass_context
def command(ctx: click.Context, symbols: bool, as_json: bool, url: str | None, api_key: str | None) -> None:
    if symbols:
        _print_symbols(as_json)
        return
    report = examine(server_url(url), api_key)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _print_report(report)
    ctx.exit(1 if report["problems"] else 0)


def examine(url: str, api_key: str | None) -> dict[str, Any]:
    report = {
        "cpu": machine.cpu_facts(),
        "experts": machine.extension_facts(),
        "memory": machine.memory_facts(),
        "memory_nodes": machine.memory_node_facts(),
        "gpus": machine.gpu_facts(),
        "gpu_problem": machine.gpu_problem(),
        "software": machine.software_facts(),
        "disk": machine.disk_facts(),
        "server": server_facts(url, api_key),
    }
    return {"can_serve": not (problems := find_problems(report)), "problems": problems} | report


def find_problems(report: dict[str, Any]) -> list[str]:
    """The reasons why this machine can't serve; empty if it can."""
    problems = machine.software_problems(report["software"])
    if report["experts"]["error"]:
        problems.append(f"the extension kt_runtime._experts does not load: {report['experts']['error']}")
    if report["gpu_problem"]:
        problems.append(f"{report['gpu_problem']}; `kt-runtime serve --device cpu` computes on the CPU")
    free_bytes = report["memory"]["available_bytes"]
    if free_bytes < PROCESSES_BYTES:
        problems.append(
            f"{format_bytes(free_bytes)} of memory are free;"
            f" SGLang's processes alone need {format_bytes(PROCESSES_BYTES)}"
        )
    return problems


def server_facts(url: str, api_key: str | None) -> dict[str, Any]:
    """`status`: the status of the server at `url`; None if there is no server, or if it refused (`error`)."""
    try:
        status = ServerAPI(url, api_key, timeout_s=STATUS_TIMEOUT_S).get("/kt/status")
    except ServerUnreachableError:
        return {"url": url, "is_running": False, "status": None, "error": None}
    except KtError as error:
        return {"url": url, "is_running": True, "status": None, "error": str(error)}
    return {"url": url, "is_running": True, "status": status, "error": None}


def _print_symbols(as_json: bool) -> None:
    touched = plugin.symbols()
    if as_json:
        click.echo(json.dumps(touched, indent=2))
        return
    table = Table("patch", f"symbols of SGLang {machine.PINNED}")
    for patch, names in touched.items():
        table.add_row(patch, "\n".join(names))
    Console().print(table)


def _print_report(report: dict[str, Any]) -> None:
    table = Table(show_header=False)
    for name, text in _rows(report):
        table.add_row(name, text)
    console = Console()
    console.print(table)
    for problem in report["problems"]:
        click.echo(f"missing: {problem}")
    click.echo("This machine can't serve yet." if report["problems"] else "This machine can serve.")


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    cpu, memory, software, huge = report["cpu"], report["memory"], report["software"], report["memory"]["huge_pages"]
    rows = [
        ("CPU", f"{cpu['model']}, {cpu['usable_processors']} of {cpu['processors']} processors usable"),
        ("CPU features", ", ".join(cpu["features"]) or "none that the kernels use"),
        ("expert kernels", ", ".join(report["experts"]["isas"]) or "none"),
        ("memory", f"{format_bytes(memory['available_bytes'])} free of {format_bytes(memory['total_bytes'])}"),
        ("huge pages", f"{format_bytes(huge['free_bytes'])} free of {format_bytes(huge['total_bytes'])} reserved"),
    ]
    rows += [("expert weights", line) for line in _node_lines(report["memory_nodes"])]
    rows.append(("processes", recommended_processes(report["memory_nodes"])))
    rows += [("GPU", _gpu_line(gpu)) for gpu in report["gpus"]] or [
        ("GPU", "none that PyTorch can use" if report["gpu_problem"] else "none: everything runs on the CPU")
    ]
    rows += [("kt-runtime", software["kt_runtime"]), ("Python", software["python"])]
    for name, package in software["packages"].items():
        wanted = f" (needs {package['wanted']})" if package["wanted"] else ""
        rows.append((name, f"{package['found'] or 'not installed'}{wanted}"))
    for name, place in report["disk"].items():
        rows.append((name.replace("_", " "), f"{place['directory']}, {format_bytes(place['free_bytes'])} free"))
    rows.append(("server", _server_line(report["server"])))
    return rows


def _gpu_line(gpu: dict[str, Any]) -> str:
    driver = f", driver {gpu['driver']}" if gpu["driver"] else ""
    return f"{gpu['name']}, {format_bytes(gpu['available_bytes'])} free of {format_bytes(gpu['total_bytes'])}{driver}"


def _node_lines(memory_nodes: dict[str, Any]) -> list[str]:
    """The placement of a server's expert weights, one line per memory node."""
    nodes, lines = memory_nodes["nodes"], []
    for node in nodes:
        share = "all" if len(nodes) == 1 else f"1/{len(nodes)} of every matrix"
        free = "" if node["free_bytes"] is None else f", {format_bytes(node['free_bytes'])} free"
        lines.append(
            f"{share} on memory node {node['node']}: {node['threads']} threads on {len(node['processors'])} processors"
            + free
        )
    return lines + ([memory_nodes["refusal"]] if memory_nodes["refusal"] else [])


def recommended_processes(memory_nodes: dict[str, Any]) -> str:
    """One process, or a rank on each memory node, with the reason. `bench scale --ranks` compares them."""
    num_nodes, refusal = len(memory_nodes["nodes"]), memory_nodes["refusal"]
    if num_nodes < 2:
        return "one: there is one memory node"
    if refusal is not None:
        return (
            f"{num_nodes} ranks, one on each memory node (--tp-size {num_nodes}): the system refuses to place one "
            "process's weights, and what a rank loads lies on its own node; for models whose heads and experts "
            f"{num_nodes} divides (docs/scale.md)"
        )
    return (
        f"one: its threads on each of {num_nodes} memory nodes read their own part of every matrix, and ranks would "
        "wait for each other four times a layer"
    )


def _server_line(server: dict[str, Any]) -> str:
    if not server["is_running"]:
        return f"none at {server['url']}"
    if server["error"]:
        return f"{server['url']}: {server['error']}"
    status = server["status"]
    plain = {key: value for key, value in status.items() if isinstance(value, str | int | float)}
    plain.pop("expert_placement", None)
    lines = [f"{server['url']}: " + ", ".join(f"{key} {value}" for key, value in plain.items())]
    for number, size in enumerate(status.get("expert_node_bytes", ())):
        lines.append(f"expert weights on memory node {number}: {format_bytes(size)}")
    return "\n".join(lines + ([refusal] if (refusal := status.get("expert_placement")) else []))
