"""Keys of the prefix cache's pages contain the hash of the adapter's content instead of SGLang's LoRA id.

Symbols (SGLang 0.5.23) and reasons:

- `Req.__init__` builds `extra_key`, under which every tier stores a request's KV: the client's own extra key plus the
  LoRA id. Each load gives an adapter a new id, so no page would be found after a restart or under another name. And a
  client that sends an adapter's id as its own extra key, on a request to the base model, would receive that adapter's
  KV (SGLang issue 24638). `cache_key` replaces `extra_key` once per request: this constructor makes every request, in
  a session or not, for text or an embedding, and each of n samples. Chunks and retracted requests keep the object.
  A hook on `Scheduler._maybe_namespace_elastic_radix_cache`, which SGLang calls later, would miss requests that are
  aborted at once: they still run for one token.
- `StreamingSession.take` and `.try_match_prefix`: a streaming session keeps the KV of its turns outside the tree and
  reuses it without comparing the key. The session's next turn has another key if its adapter's name has moved to a new
  version or the client asks for another adapter. Then the KV is released, and the turn starts from the tree's pages.

`cache_salt` stays as the client sent it: SGLang keeps it separate from the extra key in the tree and in a page's hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from kt_runtime.resident.config import ResidentSettings
from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = (
    "sglang.srt.managers.schedule_batch.Req.__init__",
    "sglang.srt.session.streaming_session.StreamingSession.take",
    "sglang.srt.session.streaming_session.StreamingSession.try_match_prefix",
    "sglang.srt.session.streaming_session.StreamingSession.release_session",
    "sglang.srt.session.streaming_session.StreamingSession.borrowed_slot",
)
FORMAT = "kt1"

_contents: dict[str, str] = {}  # content hash of each adapter that is loaded in this process, by LoRA id


def install(hooks: Hooks) -> None:
    """Hooks the processes of `kt-runtime serve`. Does nothing in any other SGLang process."""
    if ResidentSettings.from_environment() is None:
        return
    hooks.after(SYMBOLS[0], _rewrite)
    hooks.around(SYMBOLS[1], _take)
    hooks.before(SYMBOLS[2], _release_other_content)


def register(lora_id: str, content: str) -> None:
    """Requests for `lora_id` share KV with all requests for adapters with the content hash `content` from now on."""
    _contents[lora_id] = content


def forget(lora_id: str) -> None:
    """Forgets the id; ignores an unknown one. The adapter's KV stays in the cache under its content hash."""
    _contents.pop(lora_id, None)


def version_of(lora_id: str | None) -> str | None:
    """The content hash of a loaded adapter, "" for the base; None for an id that is not registered."""
    return "" if lora_id is None else _contents.get(lora_id)


def cache_key(lora_id: str | None, own: str | None) -> str:
    """The request's `extra_key`, different for any two pairs of adapter content and `own`, the client's own extra key.

    "kt1|base|-", "kt1|<hash of the adapter's content>|<sha256 of the client's key>". An unregistered adapter shares KV
    with no other: "id-" and the hash of its id replace the content hash. No key that a client sends can equal one.
    """
    adapter = "base" if lora_id is None else _contents.get(lora_id) or f"id-{_sha256(lora_id)}"
    return f"{FORMAT}|{adapter}|{_sha256(own) if own else '-'}"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _rewrite(result: None, req: Any, *args: Any, **kwargs: Any) -> None:
    own = req.extra_key
    if req.lora_id is not None:
        own = own.removesuffix(req.lora_id)
    req.extra_key = cache_key(req.lora_id, own)


def _take(original: Callable[..., Any], sessions: Any, req: Any) -> None:
    original(sessions, req)
    slot = sessions.borrowed_slot(req)
    if slot is not None:
        slot.kt_key = _key(req)


def _release_other_content(sessions: Any, params: Any) -> None:
    req = params.req
    if req is None or req.session is None or not req.session.streaming:
        return
    name = req.session.session_id
    slot = sessions.slots.get(name)
    if slot is not None and slot.kv.holds_kv and slot.kt_key != _key(req) and req.to_finish is None:
        sessions.release_session(name)


def _key(req: Any) -> tuple[str, str | None]:
    return req.extra_key, req.cache_salt
