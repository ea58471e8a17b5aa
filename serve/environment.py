"""SGLang's environment variables that would bypass the checks of the front door.

SGLang 0.5.23 reads them in `environ.py`, `entrypoints/http_server.py` and `debug_utils/dumper.py`. `kt-runtime serve`
removes them before it imports SGLang, and prints a line for each.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

HEADERS = "headers would change a request after its body has been checked"
ROUTES = "routes are as docs/http.md says"
ANOTHER_SERVER = "requests to another server would not be checked"

# A name that ends in * matches every name with that prefix.
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
    """Removes the variables from `environment`; yields a line for each one found."""
    for pattern, reason in DROPPED:
        for name in sorted(environment):
            if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])):
                del environment[name]
                yield f"{name} is left out of the environment: {reason}"
