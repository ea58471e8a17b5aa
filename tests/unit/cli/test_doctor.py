from __future__ import annotations

import copy
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kt_runtime.cli import doctor
from kt_runtime.sglang_patch.version import PINNED

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return doctor.examine("http://127.0.0.1:9", None)


@pytest.fixture
def server() -> Iterator[str]:
    """A server that answers /kt/status, with the key `secret` only."""

    class Status(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.headers.get("Authorization") == "Bearer secret"
            body = {"model": "tiny"} if is_known else {"error": {"kind": "UserError", "message": "a key is needed"}}
            self.send_response(200 if is_known and self.path == "/kt/status" else 401)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *args: object) -> None:
            """Silent: the test's output is no access log."""

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Status)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_this_machine_can_serve_and_the_table_says_with_what(run: Run) -> None:
    result = run("doctor")
    assert result.returncode == 0, result.stdout
    assert "This machine can serve." in result.stdout
    for text in ("expert kernels", "portable", f"{PINNED} (needs {PINNED})", "none at http://127.0.0.1:9"):
        assert text in result.stdout


def test_the_report_has_facts_of_every_kind(report: dict[str, Any]) -> None:
    assert report["can_serve"] and report["problems"] == []
    assert report["experts"]["isas"][-1] == "portable"
    assert 1 <= report["cpu"]["usable_processors"] <= report["cpu"]["processors"]
    assert 0 < report["memory"]["available_bytes"] <= report["memory"]["total_bytes"]
    assert all(place["free_bytes"] > 0 for place in report["disk"].values())
    assert report["server"] == {"url": "http://127.0.0.1:9", "is_running": False, "status": None, "error": None}
    assert json.loads(json.dumps(report)) == report


def test_the_report_says_where_expert_weights_would_lie(report: dict[str, Any]) -> None:
    nodes = report["memory_nodes"]["nodes"]
    assert sum(len(node["processors"]) for node in nodes) == report["cpu"]["usable_processors"]
    assert 1 <= sum(node["threads"] for node in nodes) <= report["cpu"]["usable_processors"]
    assert all(node["total_bytes"] is None or node["total_bytes"] > node["free_bytes"] >= 0 for node in nodes)
    two = [{"node": number, "processors": [0, 1], "threads": 2, "free_bytes": 2**30} for number in (0, 3)]
    lines = doctor._node_lines({"nodes": two, "refusal": "mbind was refused"})
    assert lines[1] == "1/2 of every matrix on memory node 3: 2 threads on 2 processors, 1 GiB free"
    assert lines[2] == "mbind was refused" and len(lines) == 3


@pytest.mark.parametrize(
    ("nodes", "refusal", "said"),
    [
        (0, None, "one: there is one memory node"),
        (1, "mbind was refused", "one: there is one memory node"),
        (2, None, "one: its threads on each of 2 memory nodes read their own part of every matrix"),
        (4, "mbind was refused", "4 ranks, one on each memory node (--tp-size 4): the system refuses to place"),
    ],
)
def test_one_process_or_a_rank_on_each_node_is_recommended_with_the_reason(
    nodes: int, refusal: str | None, said: str
) -> None:
    topology = {"nodes": [{"node": number} for number in range(nodes)], "refusal": refusal}
    assert doctor.recommended_processes(topology).startswith(said)


def test_a_running_server_says_where_its_expert_weights_lie() -> None:
    status = {"model": "tiny", "expert_node_bytes": [2**30, 2**31], "expert_placement": "mbind was refused 2 times"}
    line = doctor._server_line({"url": "http://x", "is_running": True, "status": status, "error": None})
    assert line.splitlines() == [
        "http://x: model tiny",
        "expert weights on memory node 0: 1 GiB",
        "expert weights on memory node 1: 2 GiB",
        "mbind was refused 2 times",
    ]


def with_packages(packages: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    def change(report: dict[str, Any]) -> None:
        report["software"]["packages"] = packages

    return change


def problems_with(report: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> str:
    changed = copy.deepcopy(report)
    change(changed)
    return "\n".join(doctor.find_problems(changed))


def test_another_or_no_sglang_is_a_problem_with_the_command_that_helps(report: dict[str, Any]) -> None:
    packages = report["software"]["packages"]
    for found, reason in (("0.5.24", f"sglang is 0.5.24, this kt-runtime needs {PINNED}"), (None, "is not installed")):
        changed = packages | {"sglang": {"found": found, "wanted": PINNED}}
        text = problems_with(report, with_packages(changed))
        assert reason in text and f"pip install 'sglang=={PINNED}'" in text


def test_another_peft_is_a_problem(report: dict[str, Any]) -> None:
    changed = {"peft": {"found": "0.22.0", "wanted": "0.21.*"}}
    text = problems_with(report, lambda copied: copied["software"]["packages"].update(changed))
    assert text == "peft is 0.22.0, this kt-runtime needs 0.21.*; pip install 'peft==0.21.*'"


def test_a_missing_extension_and_too_little_memory_are_problems(report: dict[str, Any]) -> None:
    text = problems_with(report, lambda copied: copied["experts"].update(error="no module", isas=[]))
    assert text == "the extension kt_runtime._experts does not load: no module"
    text = problems_with(report, lambda copied: copied["memory"].update(available_bytes=2**20))
    assert text == "1 MiB of memory are free; SGLang's processes alone need 2.5 GiB"


def test_a_problem_is_shown_and_ends_with_status_one(
    report: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kt_runtime.cli.main import main

    broken = report | {"problems": ["sglang is not installed"], "can_serve": False}
    monkeypatch.setattr(doctor, "examine", lambda url, api_key: broken)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "missing: sglang is not installed" in shown and "This machine can't serve yet." in shown


def test_a_running_servers_status_is_part_of_the_report(server: str) -> None:
    facts = doctor.server_facts(server, "secret")
    assert facts == {"url": server, "is_running": True, "status": {"model": "tiny"}, "error": None}
    assert doctor._server_line(facts) == f"{server}: model tiny"


def test_a_server_that_refuses_is_running_with_its_reason(server: str) -> None:
    facts = doctor.server_facts(server, None)
    assert facts["is_running"] and "a key is needed" in facts["error"]
    assert doctor._server_line(facts).startswith(f"{server}: ")


def test_symbols_lists_what_every_patch_touches(capsys: pytest.CaptureFixture[str]) -> None:
    from kt_runtime.cli.main import main

    assert main(["doctor", "--symbols", "--json"]) == 0
    touched = json.loads(capsys.readouterr().out)
    assert touched and all(name.startswith("sglang.") for names in touched.values() for name in names)
    assert main(["doctor", "--symbols"]) == 0
    text = capsys.readouterr().out
    assert all(patch in text for patch in touched)
