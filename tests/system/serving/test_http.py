"""Two real servers: one behind a key, ended by SIGTERM; one open to the network without a key, whose scheduler dies.

The first is the command in a new interpreter, the second a fork as in the other tests of servers.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from system import forked_server
from system.forked_server import ForkedServer

from kt_runtime.cli.server_process import free_port
from kt_runtime.serve.http.route_table import Access, rule_for
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.wire import ResidentClient
from kt_runtime.wire.messages import LoraSettings

KEY = "integration-test-key-0123456789"
CLIENTS_KEY, COUNTED_KEY, MINUTE_KEY = "the-key-of-a-team-of-clients", "the-key-of-few-tokens", "the-key-of-a-minute"
CLIENTS = f"""
[team]
key = "{CLIENTS_KEY}"
requests_at_once = 1
[counted]
key = "{COUNTED_KEY}"
tokens_at_once = 2100
[minute]
key = "{MINUTE_KEY}"
tokens_per_minute = 10
"""
START_SECONDS = 600.0
PROMPT: dict[str, Any] = {"input_ids": [5, 6, 7, 8]}
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}

Process = subprocess.Popen[bytes] | ForkedServer


@dataclass
class Server:
    process: Process
    port: int
    directory: Path
    log: Path
    http: httpx.Client

    @property
    def resident(self) -> ResidentClient:
        return ResidentClient(f"ipc://{self.directory}/resident-{self.port}.sock", timeout_s=120.0)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def tokens(self, **fields: Any) -> list[int]:
        answer = self.post("/generate", {**PROMPT, "sampling_params": GREEDY, **fields})
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["output_ids"]
        return tokens

    @property
    def full_log(self) -> Path:
        return self.directory / f"serve-{self.port}.log"

    def sockets(self) -> list[str]:
        return [str(path) for path in self.directory.rglob("*") if path.is_socket() or "sglang" in path.name]


@contextlib.contextmanager
def running(place: Path, host: str, key: str | None) -> Iterator[Server]:
    make_model("tiny-qwen3-moe", place / "model")
    port, log = free_port(), place / "server.log"
    log.touch()
    with tempfile.TemporaryDirectory(prefix="kt-http-") as directory:
        command = [sys.executable, "-P", "-m", "kt_runtime.cli.main", "serve", "--model", str(place / "model")]
        command += ["--host", host, "--port", str(port), "--runtime-dir", directory, "--dtype", "float32"]
        (place / "clients.toml").write_text(CLIENTS)
        command += ["--allow-no-key"] if key is None else ["--client-keys", str(place / "clients.toml")]
        command += [
            "--adapter-dir",
            str(place / "adapters"),
            "--max-lora-rank",
            "8",
            "--",
            "--decode-log-interval",
            "100",
        ]
        process = start_with_key(command, log, key) if key else forked_server.start(command, log)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            wait_for_ready_line(process, log, port)
            with httpx.Client(
                base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=120.0, trust_env=False
            ) as http:
                yield Server(process, port, Path(directory), log, http)
        finally:
            for left in descendants(process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()
            process.send_signal(signal.SIGKILL)
            process.wait()


def start_with_key(command: list[str], log: Path, key: str) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KT_RUNTIME")}
    environment |= {"PYTHONSAFEPATH": "1", "KT_RUNTIME_API_KEY": key}
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)


def wait_for_ready_line(process: Process, log: Path, port: int) -> None:
    """The probes must not be green before the first tokens are being computed."""
    deadline = time.monotonic() + START_SECONDS
    while "kt-runtime is ready: http://127.0.0.1:" not in log.read_text(errors="replace"):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
        with contextlib.suppress(httpx.TransportError):
            statuses = {
                httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False).status_code
                for path in ("/ready", "/health")
            }
            assert statuses == {503} or "computing its first tokens" in log.read_text(errors="replace")
        time.sleep(0.25)


def descendants(process: Process) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not become true"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("keyed"), "127.0.0.1", KEY) as server:
        yield server


@pytest.fixture(scope="module")
def adapter(keyed: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT directory; its adapter was published as `published`, too."""
    directory = tmp_path_factory.mktemp("adapter") / "peft"
    with keyed.resident as client:
        client.create_session("session", LoraSettings(rank=4, alpha=8.0))
        client.publish("session", "published")
        client.save("session", str(directory), optimizer=False)
    return directory


class TestBehindAKey:
    def test_start_is_told_in_a_few_lines_and_the_warm_up_leaves_no_trace(self, keyed: Server) -> None:
        """First of all tests of this server."""
        shown = keyed.log.read_text(errors="replace").splitlines()
        expected = ["model ", "memory on the ", "parsers: ", f"the full log is {keyed.full_log}", "starting", "reading"]
        expected += ["experts: ", "the model is loaded", "kt-runtime is ready: "]
        assert len(shown) <= 15 and any("GiB needed" in line for line in shown), shown
        assert [any(line.startswith(one) for line in shown) for one in expected] == [True] * len(expected), shown
        assert len(keyed.full_log.read_text(errors="replace").splitlines()) > 2 * len(shown)
        (device,) = keyed.http.get("/kt/status").json()["cache"]
        assert (device["hits"], device["misses"]) == (0, 0)
        metrics = keyed.http.get("/metrics").text
        assert not re.search(
            r"^sglang:(num_requests_total|prompt_tokens_total|e2e_request_latency\S*count)", metrics, re.M
        )

    def test_without_the_key_nothing_but_the_probes_answers(self, keyed: Server) -> None:
        paths = keyed.http.get("/openapi.json").json()["paths"]
        assert len(paths) > 60 and "/kt/adapters/{name}/rollback" in paths
        for path, operations in paths.items():
            for method in (name.upper() for name in operations):
                rule = rule_for(method, path)
                if rule is not None and rule.access is Access.PROBE:
                    continue
                for headers in ({"Authorization": ""}, {"Authorization": f"Bearer {KEY[:-1]}"}, {"X-API-Key": "x"}):
                    answer = keyed.http.request(method, path, headers=headers)
                    assert answer.status_code == 401, f"{method} {path}"
        assert keyed.http.get("/health", headers={"Authorization": ""}).status_code == 200

    def test_a_client_s_key_has_its_limits_and_changes_nothing(self, keyed: Server) -> None:
        """While its stream goes on, its next request is refused, and the server's own key is answered."""
        headers = {"Authorization": f"Bearer {CLIENTS_KEY}"}
        body = {**PROMPT, "sampling_params": GREEDY}
        expected = keyed.tokens()
        long = {**PROMPT, "sampling_params": {**GREEDY, "max_new_tokens": 2000}, "stream": True}
        with keyed.http.stream("POST", "/generate", json=long, headers=headers) as stream:
            assert stream.status_code == 200
            refused = keyed.post("/generate", body, headers=headers)
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert "1 requests of the client 'team' are under way" in refused.json()["error"]["message"]
            assert keyed.tokens() == expected
        until(lambda: keyed.post("/generate", body, headers=headers).status_code == 200)
        answer = keyed.http.delete("/kt/adapters/none", headers=headers)
        assert answer.status_code == 403 and "only the server's own key" in answer.text
        assert CLIENTS_KEY not in keyed.full_log.read_text(errors="replace")

    def test_a_client_s_tokens_are_counted_in_prompts_and_answers(self, keyed: Server) -> None:
        headers = {"Authorization": f"Bearer {COUNTED_KEY}"}
        long = {**PROMPT, "sampling_params": {**GREEDY, "max_new_tokens": 2000, "ignore_eos": True}, "stream": True}
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 200, "stream": True}
        with keyed.http.stream("POST", "/generate", json=long, headers=headers) as stream:
            next(stream.iter_lines())
            refused = keyed.post("/v1/chat/completions", {"model": "default", **chat}, headers=headers)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
            said = refused.json()["error"]
            assert said["type"] == "rate_limit_error" and "'counted' may have 2100 tokens at once" in said["message"]
            assert keyed.post("/generate", {**PROMPT, "sampling_params": GREEDY}, headers=headers).status_code == 200
        until(lambda: keyed.post("/v1/chat/completions", {"model": "default", **chat}, headers=headers).is_success)
        never = {**PROMPT, "sampling_params": {"max_new_tokens": 700, "n": 3}}
        too_many = keyed.post("/generate", never, headers=headers)
        assert too_many.status_code == 400 and "a request of the client 'counted' may have 2100" in too_many.text

        headers = {"Authorization": f"Bearer {MINUTE_KEY}"}
        many = {**PROMPT, "sampling_params": {"max_new_tokens": 50, "ignore_eos": True, "n": 2}}
        assert keyed.post("/generate", many, headers=headers).status_code == 200
        refused = keyed.post("/generate", many, headers=headers)
        assert refused.status_code == 429 and "'minute' may use 10 tokens a minute" in refused.text
        assert 500 < int(refused.headers["retry-after"]) <= 606  # its 100 and the prompt, at ten a minute

    def test_routes_that_would_change_the_base_are_refused_with_the_key(self, keyed: Server) -> None:
        for path in ("/update_weights_from_tensor", "/update_weights_from_disk", "/load_lora_adapter_from_tensors"):
            answer = keyed.post(path, {})
            assert answer.status_code == 403 and answer.json()["error"]["message"]

    def test_base_answers_on_every_interface(self, keyed: Server) -> None:
        name = keyed.http.get("/v1/models").json()["data"][0]["id"]
        assert keyed.tokens() == keyed.tokens(lora_path=None)
        completion = keyed.post("/v1/completions", {"model": name, "prompt": "hello", "max_tokens": 4}).json()
        assert completion["usage"]["completion_tokens"] > 0
        message = [{"role": "user", "content": "hello"}]
        chat = keyed.post("/v1/chat/completions", {"model": name, "messages": message, "max_tokens": 4}).json()
        assert chat["choices"][0]["message"]["role"] == "assistant"

    def test_adapter_answers_by_each_of_its_names(self, keyed: Server, adapter: Path) -> None:
        models = keyed.http.get("/v1/models").json()["data"]
        base = models[0]["id"]
        assert [model["id"] for model in models] == [base, "published"] and models[1]["parent"] == base
        request = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
        for model in (f"{base}:published", "published"):
            assert keyed.post("/v1/completions", {"model": model, **request}).status_code == 200
        unknown = keyed.post("/v1/completions", {"model": f"{base}:unknown", **request})
        assert unknown.status_code == 404 and "unknown adapter 'unknown'" in unknown.text

    def test_sglangs_own_adapter_routes_go_through_ours(self, keyed: Server, adapter: Path) -> None:
        body = {"lora_name": "loaded", "lora_path": str(adapter)}
        first = keyed.post("/load_lora_adapter", body)
        assert first.status_code == 200 and set(first.json()["loaded_adapters"]) == {"published", "loaded"}
        again = keyed.post("/load_lora_adapter", body)  # SGLang refuses a name that it has; here the name moves
        assert again.status_code == 200
        keyed.tokens(lora_path="loaded")
        hub = keyed.post("/load_lora_adapter", {"lora_name": "hub", "lora_path": "someone/adapter"})
        assert hub.status_code == 400 and "not downloaded" in hub.json()["error_message"]
        assert keyed.post("/unload_lora_adapter", {"lora_name": "loaded"}).status_code == 200
        answer = keyed.post("/generate", {**PROMPT, "lora_path": "loaded", "sampling_params": GREEDY})
        assert answer.status_code == 404 and "unknown adapter 'loaded'" in answer.text

    def test_requests_are_counted_out_again_however_they_end(self, keyed: Server, adapter: Path) -> None:
        endless: dict[str, Any] = {"max_new_tokens": 3000, "ignore_eos": True}
        several = {**PROMPT, "lora_path": "published", "sampling_params": {"n": 3, "max_new_tokens": 4}}
        assert len(keyed.post("/generate", several).json()) == 3
        batch = {"input_ids": [[5, 6], [7, 8]], "lora_path": ["published", None], "sampling_params": {"n": 2}}
        assert keyed.post("/generate", batch).status_code == 200
        stream = {**PROMPT, "lora_path": "published", "stream": True, "sampling_params": endless}
        with keyed.http.stream("POST", "/generate", json=stream) as answer:
            next(answer.iter_lines())  # and then the client is gone
        waiting = {**PROMPT, "lora_path": "published", "sampling_params": {**endless, "n": 2}}
        with pytest.raises(httpx.TimeoutException):
            keyed.post("/generate", waiting, timeout=0.7)
        too_long = {"input_ids": [5] * 9000, "lora_path": "published"}
        assert keyed.post("/generate", too_long).status_code == 400
        for wrong in (["published"], ["published", "published"]):
            assert keyed.post("/generate", {**PROMPT, "lora_path": wrong}).status_code == 400

        def nothing_is_in_flight() -> bool:
            (version,) = keyed.http.get("/kt/adapters/published").json()["versions"]
            return bool(version["in_flight"] == 0 and keyed.http.get("/kt/status").json()["requests_in_flight"] == 0)

        until(nothing_is_in_flight)
        assert keyed.http.delete("/kt/adapters/published").json() == {"name": "published", "in_flight": 0}
        until(lambda: keyed.http.get("/kt/status").json()["draining"] == {})

    @pytest.mark.parametrize(
        "fields",
        [
            {"input_ids": [-1, 5]},
            {"input_ids": [10**6]},
            {"text": "", "input_ids": None},
            {"return_logprob": True, "top_logprobs_num": 10**6},
            {"sampling_params": {"stop_token_ids": [10**6], "min_new_tokens": 1, "max_new_tokens": 2}},
            {"sampling_params": {"max_new_tokens": -1}},
            {"lora_path": {"name": "published"}},
        ],
        ids=lambda fields: next(iter(fields)),
    )
    def test_impossible_request_is_refused_and_the_server_lives(self, keyed: Server, fields: dict[str, Any]) -> None:
        answer = keyed.post("/generate", {**PROMPT, **fields})
        assert answer.status_code == 400 and answer.text
        assert len(keyed.tokens()) == 6

    def test_client_can_not_choose_a_serving_copy_by_its_id(self, keyed: Server) -> None:
        assert keyed.tokens(lora_id="no-such-copy") == keyed.tokens()

    def test_key_is_in_no_log_and_in_no_other_process(self, keyed: Server) -> None:
        assert KEY not in keyed.log.read_text(errors="replace") + keyed.full_log.read_text(errors="replace")
        assert KEY not in keyed.http.get("/server_info").text
        for process in descendants(keyed.process):
            assert KEY not in repr(process.cmdline()) and KEY not in repr(process.environ())

    def test_sockets_are_this_users_alone(self, keyed: Server) -> None:
        for path in map(Path, keyed.sockets()):
            assert path.stat().st_mode & 0o077 == 0 or path.parent.stat().st_mode & 0o077 == 0, path

    def test_sigterm_lets_a_stream_finish_and_leaves_nothing(self, keyed: Server) -> None:
        processes = alive(descendants(keyed.process))
        assert len(processes) >= 2 and keyed.sockets()
        shared = {
            Path(region.path)
            for process in processes
            for region in process.memory_maps()
            if region.path.startswith("/dev/shm/sglang")
        }
        assert shared
        request = {**PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}
        with keyed.http.stream("POST", "/generate", json=request) as answer:
            lines = answer.iter_lines()
            next(lines)
            keyed.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"completion_tokens":40' in rest[-2]
        assert keyed.process.wait(60) == 0
        assert not alive(processes) and not keyed.sockets()
        assert not [path for path in shared if path.exists()]
        assert "Traceback" not in keyed.log.read_text(errors="replace") + keyed.full_log.read_text(errors="replace")


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("exposed"), "0.0.0.0", None) as server:
        yield server


class TestOpenToTheNetworkWithoutAKey:
    def test_everything_that_changes_the_server_is_denied(self, exposed: Server) -> None:
        paths = exposed.http.get("/openapi.json").json()["paths"]
        num_denied = 0
        for path, operations in paths.items():
            for method in (name.upper() for name in operations):
                rule = rule_for(method, path)
                if rule is None or rule.access in (Access.GUARDED, Access.REFUSED):
                    answer = exposed.http.request(method, re.sub(r"\{.*?\}", "x", path), json={})
                    assert answer.status_code == 403, f"{method} {path}"
                    num_denied += 1
        assert num_denied > 40

    def test_it_still_answers_questions(self, exposed: Server) -> None:
        assert len(exposed.tokens()) == 6
        assert exposed.http.get("/kt/status").status_code == 200

    def test_death_of_the_scheduler_ends_the_server_and_leaves_nothing(self, exposed: Server) -> None:
        processes = alive(descendants(exposed.process))
        (scheduler,) = [process for process in processes if "scheduler" in " ".join(process.cmdline())]
        scheduler.kill()
        assert exposed.process.wait(30) == 1
        until(lambda: not alive(processes), 10)
        assert not [path for path in exposed.sockets() if not path.endswith(".lock")]
        shown = exposed.log.read_text(errors="replace")
        assert f"the end of {exposed.full_log}:\n  | " in shown
        assert "kt-runtime: one of the server's processes has died; the server ends" in shown
