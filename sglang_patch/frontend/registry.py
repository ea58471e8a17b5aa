"""SGLang 0.5.23's LoRA registry with names that can move. Used in the frontend process only.

Symbol: `sglang.srt.lora.lora_registry.LoRARegistry`, subclassed. Reasons:

- SGLang can only remove a name, wait until it is unused, and add it again: requests in between fail. Here a name moves
  in one step, and the usage counters of the previous copy are kept.
- SGLang's `acquire` looks a name up, yields to other coroutines, and only then counts. In between, a copy could look
  unused and be dropped while a request needs it. Here `acquire` awaits nothing between look-up and count. All callers
  share one event loop, so no lock is needed.
- `pin` gives the version that a name means now a second, private name, which keeps it while the name moves on.
- `release` of an id that was never acquired (by a request that failed earlier) is ignored; SGLang's would fail a task.
"""

from __future__ import annotations

import asyncio

from sglang.srt.lora.lora_registry import LoRARef, LoRARegistry


class UsageCounter:
    """Number of requests that use one serving copy. Belongs to one event loop; only `wait_for_zero` waits."""

    def __init__(self) -> None:
        self.count = 0
        self._unused = asyncio.Event()
        self._unused.set()

    def value(self) -> int:
        return self.count

    def change(self, by: int) -> None:
        self.count += by
        if self.count <= 0:
            self._unused.set()
        else:
            self._unused.clear()

    async def wait_for_zero(self) -> None:
        while self.count > 0:
            await self._unused.wait()


class VersionedRegistry(LoRARegistry):
    """SGLang calls the async methods; the frontend of kt-runtime calls the others, in the same event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._counters: dict[str, UsageCounter] = {}
        self._pinned: dict[str, str] = {}

    def move(self, name: str, lora_id: str) -> str | None:
        former = self._registry.get(name)
        self._registry[name] = LoRARef(lora_id=lora_id, lora_name=name)
        self._counters.setdefault(lora_id, UsageCounter())
        return former.lora_id if former else None

    def remove(self, name: str) -> str | None:
        former = self._registry.pop(name, None)
        return former.lora_id if former else None

    def names(self) -> dict[str, str]:
        return {name: ref.lora_id for name, ref in self._registry.items()}

    def num_in_flight(self, lora_id: str) -> int:
        counter = self._counters.get(lora_id)
        return counter.value() if counter else 0

    async def wait_unused(self, lora_id: str) -> None:
        counter = self._counters.get(lora_id)
        if counter is not None:
            await counter.wait_for_zero()

    def forget(self, lora_id: str) -> None:
        self._counters.pop(lora_id, None)

    def pin(self, alias: str, name: str) -> str:
        """Until `unpin(alias)`, `alias` means the copy that `name` means now, and counts as one use. Returns its id.

        Raises ValueError for an unknown name. An alias has a ":", which no adapter's name has; `names` has no alias.
        """
        assert ":" in alias and alias not in self._pinned
        lora_id = self._lookup(name)
        self._counters[lora_id].change(+1)
        self._pinned[alias] = lora_id
        return lora_id

    def unpin(self, alias: str) -> None:
        lora_id = self._pinned.pop(alias, None)
        if lora_id is not None and lora_id in self._counters:
            self._counters[lora_id].change(-1)

    async def acquire(self, lora_name: str | list[str | None]) -> str | list[str | None]:  # type: ignore[override]
        """Counts one use per name and returns the LoRA ids. Raises ValueError for an unknown name (SGLang answers 400)
        before it counts any."""
        if isinstance(lora_name, str):
            found = self._lookup(lora_name)
            self._counters[found].change(+1)
            return found
        lora_ids = [None if name is None else self._lookup(name) for name in lora_name]
        for lora_id in lora_ids:
            if lora_id is not None:
                self._counters[lora_id].change(+1)
        return lora_ids

    async def release(self, lora_id: str | list[str | None] | None) -> None:  # type: ignore[override]
        for one in [lora_id] if lora_id is None or isinstance(lora_id, str) else lora_id:
            if one is not None and one in self._counters:
                self._counters[one].change(-1)

    async def get_unregistered_loras(self, lora_name: set[str]) -> list[str]:
        """Always empty: SGLang would load these from paths, which our adapters lack; `acquire` names missing ones."""
        return []

    def _lookup(self, name: str) -> str:
        if name in self._pinned:
            return self._pinned[name]
        ref = self._registry.get(name)
        if ref is None:
            raise ValueError(f"unknown adapter {name!r}; served are: {', '.join(sorted(self._registry)) or 'none'}")
        return ref.lora_id
