"""Freezes objects for the garbage collector only where that makes its collections much shorter.

SGLang 0.5.23 freezes all objects of its processes at each POST /freeze_gc (`gc.freeze`): collections no longer visit
them. Reference cycles among frozen objects are never collected, also those that become garbage later. Each freeze
during requests or training steps therefore keeps some of their objects for ever, with their tensors: after eight
minutes of fuzzing the scheduler had 10,777 such objects and 8 MB of their memory, with this patch 49 objects.

The first freeze of a process happens, whatever it adds: when the server is ready. The process then also takes the
memory that requests will need for Python's small objects (`resident/memory.py`).

CPython collects all objects only when those that survived since the last time are a quarter of those that there were
then (`long_lived_total`), and does not notice that objects were frozen. So each freeze ends with a collection, of the
few objects that are left: without it the garbage of requests would stay until a quarter as many objects have survived
as a process has at its start.

Symbol: `sglang.srt.utils.common.freeze_gc`. A hook on it reaches every module that imports the function: `scheduler`,
`detokenizer_manager` and `tokenizer_manager`. A hook on each of these names would wrap the hooks of the others.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Sequence

from kt_runtime.resident.memory import reserve_for_small_objects
from kt_runtime.sglang_patch.hooks import Hooks

logger = logging.getLogger(__name__)

SYMBOLS = ("sglang.srt.utils.common.freeze_gc",)
# A freeze happens if at least this share of the frozen objects are to be added. The number of freezes is therefore
# bounded by how many objects a process can have.
FEWEST_NEW_SHARE = 0.1


def install(hooks: Hooks) -> None:
    hooks.around(SYMBOLS[0], Freezes())


_num_frozen = 0
"""Objects frozen by this process, and by those that it is a fork of until they made it; also those freed since.
`gc.get_freeze_count` visits each frozen object: for two million 0.08 s, in each process of a server that starts."""
_frozen_by: int | None = None
"""The process of the last freeze through SGLang's function: a fork's first one is still to come."""


def freeze_all() -> None:
    """Collects garbage and freezes the rest."""
    global _num_frozen
    gc.collect()
    _num_frozen += _num_objects()
    gc.freeze()


class Freezes:
    """Replaces SGLang's `freeze_gc`."""

    def __call__(self, original: Callable[..., None], context: str, gc_threshold: Sequence[int] | None = None) -> None:
        """As SGLang's `freeze_gc`, after a collection, or without effect but for the thresholds."""
        global _num_frozen, _frozen_by
        gc.collect()
        num_new = _num_objects()
        if _frozen_by == os.getpid() and num_new < FEWEST_NEW_SHARE * _num_frozen:
            if gc_threshold is not None:
                gc.set_threshold(*gc_threshold)
            logger.debug("%s: %d objects stay unfrozen, beside %d frozen ones", context, num_new, _num_frozen)
            return
        original(context, gc_threshold)
        gc.collect()
        _num_frozen += num_new
        if _frozen_by != os.getpid():
            reserve_for_small_objects()
        _frozen_by = os.getpid()


def _num_objects() -> int:
    """Objects that a collection visits. Counted within one call, in which no other thread runs: `len(gc.get_objects())`
    lets one run while the list of all objects exists. If this thread is in `tuple(... for ...)`, its tuple has a second
    owner then, and Python raises SystemError there."""
    return next(map(len, iter(gc.get_objects, None)))
