"""The pool of linear attention's states: its size, and what is refused for models that have one.

Symbols: none. SGLang 0.5.23 takes the size from `--max-mamba-cache-size`; a slot holds the state of one sequence in all
layers. With `no_buffer`, the strategy of a radix cache with states on a CPU, a running request takes up to three slots:
its own, a copy that the cache keeps of its prompt, and one that is being freed (its `max_running_requests` is the
number of slots divided by three). What is left holds the states of cached prefixes.

The host tier has a pool of states of its own (`mem_cache.pool_host.mamba.MambaPoolHost`), as many times the slots as
its KV pool has the tokens (`--hicache-ratio`). SGLang copies a state there when it copies the keys and values before
it, and back with them. `no_buffer` has pages of one token.

The disk tier is refused. It keeps a record for each page, thousands for a prompt of pages of one token, and SGLang asks
a storage backend for states by another interface than for pages (`batch_get_v2`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kt_runtime.errors import InvalidValueError
from kt_runtime.families import family_for
from kt_runtime.families.base import Family
from kt_runtime.sglang_patch.options import last_value

SYMBOLS: tuple[str, ...] = ()
SIZE_OPTION, PAGE_OPTION = "--max-mamba-cache-size", "--page-size"
SLOTS_PER_REQUEST = 3
KEPT_PER_REQUEST = 1
"""Slots for cached prefixes, per running request, unless the user asks for another size."""


class Options(Protocol):
    """`serve.options.named.ServeOptions`."""

    @property
    def max_running_requests(self) -> int: ...
    @property
    def passed_on(self) -> Sequence[str]: ...
    @property
    def cache_page_tokens(self) -> int | None: ...
    @property
    def cache_disk_bytes(self) -> int: ...


def state_slots(options: Options) -> int:
    """Slots of the pool: what the user passes on to SGLang, or enough for the running requests and some prefixes.

    Raises InvalidValueError for fewer than the running requests need.
    """
    least = SLOTS_PER_REQUEST * options.max_running_requests
    given = last_value(options.passed_on, SIZE_OPTION)
    if given is None:
        return least + KEPT_PER_REQUEST * options.max_running_requests
    if not given.isdigit() or int(given) < least:
        raise InvalidValueError(
            f"{SIZE_OPTION} {given}: the pool of linear attention's states needs at least {least} slots for "
            f"--max-running-requests {options.max_running_requests}, {SLOTS_PER_REQUEST} for each; raise the one or "
            f"lower the other"
        )
    return int(given)


def state_arguments(options: Options, family: Family, on_cpu: bool) -> list[str]:
    """SGLang's arguments for a model whose layers keep states; empty for another.

    Raises InvalidValueError for an accelerator, for a disk tier of the prefix cache, and for pages of several tokens.
    """
    if not family.keeps_states:
        return []
    what = f"{family.name} keeps a state of each sequence beside keys and values"
    if not on_cpu:
        raise InvalidValueError(
            f"--device: {what}, which is computed on a CPU only, for serving and training alike; give --device cpu"
        )
    if options.cache_disk_bytes:
        raise InvalidValueError(
            f"--cache-disk: {what}, and SGLang 0.5.23 then has pages of 1 token: the disk tier would keep a record for "
            "each token, and has none for states. --cache-host keeps both in memory"
        )
    if options.cache_page_tokens not in (None, 1):
        raise InvalidValueError(
            f"--cache-page-tokens {options.cache_page_tokens}: {what}; SGLang 0.5.23 then has pages of 1 token only"
        )
    page = last_value(options.passed_on, PAGE_OPTION)
    if page not in (None, "1"):
        raise InvalidValueError(f"{PAGE_OPTION} {page}: {what}; SGLang 0.5.23 then has pages of 1 token only")
    return [PAGE_OPTION, "1", SIZE_OPTION, str(state_slots(options))]


def slot_bytes(config: Mapping[str, Any], number_bytes: int) -> int:
    """Bytes of one sequence's state; 0 for a model without states. `number_bytes`: of a number of the model's dtype."""
    of_dtype, of_float32 = family_for(config).state_numbers(config)
    return of_dtype * number_bytes + of_float32 * 4
