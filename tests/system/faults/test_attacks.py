"""What the field's advisories were about, tried on real servers: programs in pickles, templates and model directories,
paths in names, requests to other machines, sockets that anybody can reach. docs/faults.md has the advisories."""

from __future__ import annotations

import base64
import ipaddress
import json
import pickle
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from system import forked_server
from system.conftest import Served

from kt_runtime.cli.server_process import server
from kt_runtime.serve.models.make_model import make_model

SECONDS = 120.0
GENERATE = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}


class Canary:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Path]]:
        return (Path.touch, (self.path,))


@pytest.fixture
def served(float32_servers: Callable[[str], Served]) -> Served:
    return float32_servers("tiny-qwen3-moe")


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.api.url, timeout=SECONDS, trust_env=False) as client:
        yield client


def test_pickles_are_loaded_by_no_route(http: httpx.Client, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    pickled = pickle.dumps(Canary(canary))
    text, code = base64.b64encode(pickled).decode(), pickled.hex()
    tries: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/update_weights_from_tensor", {"serialized_named_tensors": [text], "load_format": None}),
        ("/update_weights_from_ipc", {"zmq_handles": {"0": text}}),
        ("/load_lora_adapter_from_tensors", {"lora_name": "x", "serialized_tensors": text, "config_dict": {}}),
        ("/generate", {**GENERATE, "custom_logit_processor": json.dumps({"callable": code})}),
        ("/generate", {"input_embeds": text, "sampling_params": GENERATE["sampling_params"]}),
        ("/v1/completions", {"model": "model", "prompt_embeds": text, "max_tokens": 2}),
        ("/configure_logging", {"dump_requests_folder": str(tmp_path), "crash_dump_folder": str(tmp_path)}),
        ("/v1/rerank", {"model": "model", "query": "{{ 7 * 7 }}", "documents": ["a"]}),
    )
    for path, body in tries:
        answer = http.post(path, json=body)
        assert answer.status_code in (400, 403, 404), (path, answer.text)
        raw = http.post(path, content=pickled, headers={"Content-Type": "application/octet-stream"})
        assert 400 <= raw.status_code < 500, (path, raw.text)
    assert not canary.exists() and list(tmp_path.iterdir()) == []
    assert http.post("/generate", json=GENERATE).status_code == 200


@pytest.mark.parametrize(
    "name",
    ["../x", "..", "a/../../b", "/etc/x", "%2e%2e%2fx", "a\0b", "x" * 10_000, "ａ", "tinker://a/b/../../x", "a b", ""],
    ids=lambda name: repr(name)[:12],
)
def test_a_name_is_no_path(served: Served, http: httpx.Client, name: str, tmp_path: Path) -> None:
    adapters = served.model_directory.parent / "adapters"
    before = set(adapters.rglob("*"))
    for path, body in (
        ("/kt/adapters", {"name": name, "path": str(tmp_path)}),
        ("/load_lora_adapter", {"lora_name": name, "lora_path": str(tmp_path)}),
        ("/unload_lora_adapter", {"lora_name": name}),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code in (400, 404), (path, answer.text)
    assert set(adapters.rglob("*")) == before


def test_the_name_of_an_uploaded_file_is_never_a_path(served: Served, http: httpx.Client) -> None:
    place = served.model_directory.parent
    row = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    for name in ("../../canary", "..\\..\\canary", "/tmp/canary", "canary/../../canary"):
        answer = http.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": (name, f"{row}\n" * 10)})
        assert answer.status_code == 200, answer.text
        uploaded = answer.json()
        assert uploaded["filename"] == "canary"
        assert not list(place.rglob("*canary*")) and not Path("/tmp/canary").exists()
        assert http.delete(f"/v1/files/{uploaded['id']}").status_code == 200
    for identifier in ("..%2f..%2fmodel", "../../model", "%2e%2e"):
        assert http.get(f"/v1/files/{identifier}/content").status_code in (400, 404)


def test_pictures_and_addresses_are_refused_and_nobody_is_asked_for_them(http: httpx.Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.setblocking(False)
        url = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/picture.png"
        for part in (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
            {"type": "video_url", "video_url": {"url": url}},
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        ):
            body = {"model": "model", "messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 400, answer.text
        assert http.post("/generate", json={**GENERATE, "image_data": [url]}).status_code == 400
        with pytest.raises(BlockingIOError):  # nobody has connected
            elsewhere.accept()


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    return {
        (one.laddr.ip, one.laddr.port)
        for one in process.net_connections("inet")
        if one.status == psutil.CONN_LISTEN or one.type == socket.SOCK_DGRAM
    }


def test_nothing_but_the_http_port_can_be_reached_from_elsewhere(served: Served) -> None:
    """SGLang's channels between its processes, whose messages are pickles, are files in a private directory. What
    torch.distributed (gloo) listens on, in the scheduler, is on this machine's own loopback interface."""
    where = urlsplit(served.api.url)
    frontend = forked_server.frontend_of(served.model_directory)
    assert listening(frontend) == {(where.hostname, where.port)}
    children = frontend.children(recursive=True)
    assert children
    for process in children:
        reachable = {address for address, _ in listening(process) if not ipaddress.ip_address(address).is_loopback}
        assert not reachable, process.cmdline()


PROGRAM = "{{{{ cycler.__init__.__globals__.os.system('touch {canary}') }}}}{{{{ ''.__class__.__mro__ }}}}"
CODE = "import pathlib\npathlib.Path({canary!r}).touch()\nclass Evil:\n    pass\n"


def add_programs(model: Path, canary: Path) -> None:
    """In each place of a model's directory from which other servers have run them."""
    (model / "evil.py").write_text(CODE.format(canary=str(canary)))
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(canary)))
    (model / "adapter_model.bin").write_bytes(pickle.dumps(Canary(canary)))
    for file, classes in (
        ("config.json", {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}),
    ):
        settings = json.loads((model / file).read_text(encoding="utf-8"))
        settings["auto_map"] = classes
        if file == "tokenizer_config.json":
            settings["chat_template"] = PROGRAM.format(canary=canary)
        (model / file).write_text(json.dumps(settings), encoding="utf-8")


def test_programs_in_a_model_s_directory_are_not_run(tmp_path: Path) -> None:
    """Neither its classes nor its pickles; its template is one that can't reach the interpreter."""
    canary = tmp_path / "canary"
    make_model("tiny-qwen3-moe", tmp_path / "model", seed=2)
    add_programs(tmp_path / "model", canary)
    options = ["--dtype", "float32", "--max-total-tokens", "2048", "--adapter-dir", str(tmp_path / "adapters")]
    with (
        server(str(tmp_path / "model"), options, tmp_path / "server.log") as api,
        httpx.Client(base_url=api.url, timeout=SECONDS, trust_env=False) as http,
    ):
        chat = {"model": "model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/messages", chat),
            ("/v1/rerank", {"model": "model", "query": "a", "documents": ["b"]}),
        ):
            answer = http.post(path, json=body)
            assert answer.status_code in (400, 403), (path, answer.text)
            assert "Traceback" not in answer.text and str(tmp_path) not in answer.text
        for given in (
            {"chat_template": PROGRAM.format(canary=canary)},
            {"chat_template_kwargs": {"chat_template": "x"}},
        ):
            assert http.post("/v1/chat/completions", json={**chat, **given}).status_code == 400
        assert http.post("/generate", json=GENERATE).status_code == 200
    assert not canary.exists()
