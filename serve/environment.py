"""Variables of SGLang's in the operator's environment that would go around what the front door checks.

SGLang 0.5.23 reads them in `environ.py`, `entrypoints/http_server.py` and `debug_utils/dumper.py`. `kt-runtime serve`
takes them out before it imports SGLang, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

HEADERS = "headers would change a request after its body has been checked"
ROUTES = "routes are as docs/http.md says"
ANOTHER_SERVER = "requests to another server would not be checked"

# A name that ends in * stands for all that begin so.
DROPPED: tuple[tuple[str, str], ...] = (
    ("SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES", HEADERS),
    ("SGLANG_ENABLE_REQUEST_DECOMPRESSION", "a body's size is checked as it is sent"),
    ("SGLANG_OLLAMA_*", ROUTES),
    ("SGLANG_HTTP_SERVER_APP_PATH", ROUTES),
    ("SGLANG_RUST_SERVER", ANOTHER_SERVER),
    ("SGLANG_GRPC_PORT", ANOTHER_SERVER),
    ("DUMPER_SERVER_PORT", "it writes tensors wherever a request says"),
    ("SGLANG_EXPOSE_OWN_ENV_VARS", "the environment would be in the answer of /server_info"),
)


def dropped_variables(environment: MutableMapping[str, str]) -> Iterator[str]:
    """Takes them out of `environment`; a line for each that was there."""
    for pattern, reason in DROPPED:
        for name in sorted(environment):
            if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])):
                del environment[name]
                yield f"{name} is left out of the environment: {reason}"
