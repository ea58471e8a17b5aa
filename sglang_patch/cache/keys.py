"""The prefix cache's pages belong to an adapter's content, not to the id under which SGLang happens to have it loaded.

Symbols (SGLang 0.5.23) and reasons:

- `Req.__init__` makes the key that every tier keeps a request's KV under, `extra_key`, by writing the LoRA id behind
  what the client sent. Ids are new with every load, so that nothing would be found again after a restart or under
  another name; and a client that sends some adapter's id as its own extra key, on a request to the base model, would be
  given that adapter's KV (SGLang issue 24638). `cache_key` replaces it, once for each request: every request, of a
  session or not, for text or an embedding, is made here, and what is sampled n times is n requests. Chunks and
  retracted requests keep the object. `Scheduler._maybe_namespace_elastic_radix_cache`, which comes later, is left out
  for requests that are aborted at once, but run for one token.
- `StreamingSession.take` and `.try_match_prefix`: a streaming session keeps the KV of its turns outside the tree and
  reuses it without looking at the key. When the session's next turn has another key, because its adapter's name has
  moved on or the client asks for another adapter, the KV is released, and the turn starts with what the tree has.

`cache_salt` stays as the client sent it: SGLang keeps it apart from the extra key in the tree and in a page's hash.
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
    """Hooks a server that `kt-runtime serve` started; in any other SGLang process, nothing."""
    if ResidentSettings.from_environment() is None:
        return
    hooks.after(SYMBOLS[0], _rewrite)
    hooks.around(SYMBOLS[1], _take)
    hooks.before(SYMBOLS[2], _release_other_content)


def register(lora_id: str, content: str) -> None:
    """From now on requests for `lora_id` share KV with all others for adapters of the content hash `content`."""
    _contents[lora_id] = content


def forget(lora_id: str) -> None:
    """An unknown id is ignored. What was computed for it stays in the cache, under its content."""
    _contents.pop(lora_id, None)


def cache_key(lora_id: str | None, own: str | None) -> str:
    """`own`: what the client sent. Never equal for two pairs of content and `own`, nor to what a client can send.

    "kt1|base|-", "kt1|<hash of the adapter's content>|<sha256 of the client's key>". An adapter that was not registered
    shares with nobody: "id-" and the hash of its id stand where the content's would.
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
