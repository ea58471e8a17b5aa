"""Variables of SGLang's that would go around the front door."""

from __future__ import annotations

import re
from importlib.metadata import files

from kt_runtime.serve.environment import DROPPED, dropped_variables

# They are logged, or are ports between SGLang's own processes.
HARMLESS = {"SGLANG_LOG_REQUEST_HEADERS", "SGLANG_TCP_STORE_PORT", "SGLANG_PORT"}


def test_what_goes_around_the_checks_is_taken_out_and_named() -> None:
    environment = {
        "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES": "1",
        "SGLANG_OLLAMA_CHAT_ROUTE": "/kt/chat",
        "SGLANG_GRPC_PORT": "1",
        "SGLANG_LOG_MS": "1",
        "HOME": "/home/me",
    }
    lines = list(dropped_variables(environment))
    assert environment == {"SGLANG_LOG_MS": "1", "HOME": "/home/me"}
    assert [line.partition(" ")[0] for line in lines] == [
        "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES",
        "SGLANG_OLLAMA_CHAT_ROUTE",
        "SGLANG_GRPC_PORT",
    ]
    assert not list(dropped_variables(environment))


def test_sglang_still_reads_each_of_them() -> None:
    sources = [file for file in files("sglang") or () if file.name in ("environ.py", "http_server.py", "dumper.py")]
    text = "".join(str(file.read_text()) for file in sources)
    assert not [name for name, _ in DROPPED if name.rstrip("*") not in text]


def test_no_other_variable_opens_a_port_or_lets_headers_change_requests() -> None:
    """What a later SGLang adds is looked at before it is allowed."""
    source = next(file for file in files("sglang") or () if str(file).endswith("srt/environ.py")).read_text()
    names = set(re.findall(r"^    (SGLANG_\w+) = Env", str(source), re.MULTILINE))
    assert len(names) > 300
    telling = {name for name in names if re.search(r"HEADER|_ROUTE$|_APP_PATH|RUST_SERVER$|DECOMPRESS|_PORT$", name)}
    dropped = {name for name, _ in DROPPED}
    assert telling - dropped == HARMLESS
