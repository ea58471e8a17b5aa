"""A request whose adapter has no slot is not overtaken without end by requests whose adapters have one.

SGLang (0.5.23) lets every waiting request run whose adapter runs already. While streams of some adapters never all
pause, the slots of these adapters never become free, and a request for another one never runs. SGLang's own remedy,
`LoRADrainer`, counts slots but not the memory that adapters take, and measures by the clock, which differs by rank.

Here, once a request was refused for `PATIENCE_BATCHES` batches, only adapters that fit together with its own take
new requests. The running requests of the others end, their slots become free, and the request runs. All of that follows
from batches and queues, which are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

PATIENCE_BATCHES = 32
"""Decode steps, mostly. Many answers end within as many, and slots become free by themselves."""


class Overtaking:
    """Which requests of one scheduler may run. They are SGLang's `Req`; read: `.lora_id`, `.output_ids` and
    `.sampling_params`.

    `could_hold`: whether one batch could have all these adapters. `is_coming`: whether an adapter is being copied into
    a slot already.
    """

    def __init__(self, could_hold: Callable[[set[str | None]], bool], is_coming: Callable[[str | None], bool]) -> None:
        self._could_hold, self._is_coming = could_hold, is_coming
        self._first: Any = None
        self._beside: set[str | None] = set()

    def begin(self, batch: int, waiting: Iterable[Any], running: Sequence[Any]) -> None:
        """Called before a pass through the `waiting` requests. `batch`: how many batches were formed so far. `running`:
        requests that have not ended."""
        self._first = None
        adapters = {request.lora_id for request in running}
        late = [
            request
            for request in waiting
            if batch - getattr(request, "kt_refused_at", batch) >= PATIENCE_BATCHES
            and request.lora_id not in adapters
            and not self._is_coming(request.lora_id)
        ]
        if late:
            self._first = min(late, key=lambda request: request.kt_refused_at)
            self._beside = self._adapters_beside(self._first.lora_id, running)

    def allows(self, lora_id: str | None) -> bool:
        """Whether a request for this adapter delays no request that has waited too long."""
        return self._first is None or lora_id == self._first.lora_id or lora_id in self._beside

    def note_refused(self, batch: int, request: Any) -> None:
        """The first time counts."""
        if not hasattr(request, "kt_refused_at"):
            request.kt_refused_at = batch

    def _adapters_beside(self, lora_id: str | None, running: Sequence[Any]) -> set[str | None]:
        """Running adapters that fit together with `lora_id`. They are chosen from those whose requests last longest:
        the others' end sooner."""
        lasting: dict[str | None, int] = {}
        for request in running:
            remaining = request.sampling_params.max_new_tokens - len(request.output_ids)
            lasting[request.lora_id] = max(remaining, lasting.get(request.lora_id, 0))
        kept: set[str | None] = set()
        for each in sorted(lasting, key=lambda each: -lasting[each]):
            if self._could_hold({lora_id, each, *kept}):
                kept.add(each)
        return kept
