"""The sizes of the prefix cache's tiers, computed from options and config.json before anything is loaded.

SGLang keeps KV in pages of `page_tokens` tokens. The device tier is SGLang's KV pool. The host tier is a second pool,
with a copy of every device page (write-through) and of pages evicted from the device. The host copy of a page that the
device uses can't be evicted, so a host tier no larger than the device tier has no room for other pages.

A model that keeps states (`families.base.Family.keeps_states`) has pages of one token, and a second pool in both
tiers: the host tier's size is for keys, values and states, in the proportion of the device tier.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kt_runtime.cache.page_store import SMALLEST_QUOTA
from kt_runtime.errors import InvalidValueError
from kt_runtime.families import family_for
from kt_runtime.serve.memory.plan import cached_numbers_per_token, format_bytes
from kt_runtime.serve.options.cache_plan import CachePlan
from kt_runtime.serve.options.named import ServeOptions
from kt_runtime.sglang_patch.delta.states import slot_bytes, state_slots

# A page is a record on disk. With 1 token a page, a prompt is thousands of small records. With 256, more than half a
# page is recomputed on average where two prompts diverge.
PAGE_TOKENS = 64
# SGLang's scheduler starts a request only if a page for the prompt, one for the answer and one more are free.
LEAST_DEVICE_PAGES = 4
# Room for a copy of the whole device pool, and for an equally long prompt that is being read from the disk.
HOST_PER_DEVICE = 2


def plan_cache(options: ServeOptions, config: Mapping[str, Any], directory: Path | None) -> CachePlan | None:
    """The tiers' sizes; None if no option asks for tiers, and SGLang's own prefix cache on the device is the only one.

    `directory`: of the disk tier, if there is one. Raises InvalidValueError for sizes too small for a page or a prompt.
    """
    if not options.asks_for_cache:
        return None
    keeps_states = family_for(config).keeps_states
    tiers = (options.cache_host_bytes or options.cache_disk_bytes) and not keeps_states
    page_tokens = options.cache_page_tokens or (PAGE_TOKENS if tiers else 1)
    number_bytes = 4 if options.dtype == "float32" else 2
    token_bytes = cached_numbers_per_token(config) * number_bytes
    slots, of_slot = (state_slots(options), slot_bytes(config, number_bytes)) if keeps_states else (0, 0)
    device_tokens = _device_tokens(options, page_tokens, token_bytes)
    host_tokens = _host_tokens(options, page_tokens, token_bytes, device_tokens, slots * of_slot)
    disk_bytes = options.cache_disk_bytes
    plan = CachePlan(
        page_tokens,
        token_bytes,
        device_tokens,
        host_tokens,
        disk_bytes,
        directory if disk_bytes else None,
        read_only=options.cache_read_only,
        state_slots=slots,
        slot_bytes=of_slot,
        ranks=options.tp_size // options.nnodes,
        page_parts=1 if config.get("kv_lora_rank") else options.tp_size,  # all heads read one latent
    )
    _check_disk(plan)
    return plan


def _device_tokens(options: ServeOptions, page_tokens: int, token_bytes: int) -> int:
    least = LEAST_DEVICE_PAGES * page_tokens
    if options.cache_device_bytes is None:
        tokens, given = options.max_total_tokens, f"--max-total-tokens {options.max_total_tokens}"
    else:
        tokens = options.cache_device_bytes // token_bytes
        given = f"--cache-device {format_bytes(options.cache_device_bytes)}: {tokens} tokens of {token_bytes} bytes"
    if tokens < max(least, 16):
        raise InvalidValueError(
            f"{given}: the device tier holds the requests that are running, too: at least {max(least, 16)} tokens "
            f"({LEAST_DEVICE_PAGES} pages of {page_tokens}), {format_bytes(max(least, 16) * token_bytes)}"
        )
    return tokens // page_tokens * page_tokens


def _host_tokens(
    options: ServeOptions, page_tokens: int, token_bytes: int, device_tokens: int, state_bytes: int
) -> int:
    """`state_bytes`: of the device's pool of states; the host tier has as many times of them as of the tokens."""
    if options.cache_host_bytes is None:
        return HOST_PER_DEVICE * device_tokens if options.cache_disk_bytes else 0
    device_bytes = device_tokens * token_bytes + state_bytes
    tokens = options.cache_host_bytes * device_tokens // (page_tokens * device_bytes) * page_tokens
    needed = format_bytes(HOST_PER_DEVICE * device_bytes)
    if options.cache_host_bytes == 0:
        if options.cache_disk_bytes:
            raise InvalidValueError(
                "--cache-host 0: pages go to the disk and come from it through the host tier; leave the option out "
                f"(it is then {needed}, {HOST_PER_DEVICE} times the device tier), or leave out --cache-disk"
            )
        return 0
    if tokens <= device_tokens:
        states = f" with {format_bytes(state_bytes)} of linear attention's states" if state_bytes else ""
        raise InvalidValueError(
            f"--cache-host {format_bytes(options.cache_host_bytes)}: {tokens} tokens in pages of {page_tokens}, and "
            f"the device tier has {device_tokens} ({format_bytes(device_bytes)}{states}), each with a copy in "
            f"the host tier: nothing else would ever fit. Allowed is more than the device tier, {needed} is a good "
            "size; or make the device tier smaller with --cache-device"
        )
    return tokens


def _check_disk(plan: CachePlan) -> None:
    least = plan.ranks * max(SMALLEST_QUOTA, 8 * plan.record_bytes)
    if 0 < plan.disk_bytes < least:
        of_ranks = f"for each of {plan.ranks} ranks " if plan.ranks > 1 else ""
        raise InvalidValueError(
            f"--cache-disk {format_bytes(plan.disk_bytes)}: at least {format_bytes(least)} ({of_ranks}1 MiB, and 8 "
            f"pages of {plan.page_tokens} tokens, {format_bytes(plan.record_bytes)} each)"
        )


def describe(plan: CachePlan) -> str:
    """One line about the tiers for the server's start."""
    tiers = [f"device {plan.device_tokens} tokens ({format_bytes(plan.device_tokens * plan.token_bytes)})"]
    if plan.host_tokens:
        states = f" and {plan.host_slots} states" if plan.host_slots else ""
        tiers.append(f"host {plan.host_tokens} tokens{states} ({format_bytes(plan.host_bytes)})")
    if plan.disk_bytes:
        how = "read from" if plan.read_only else "in"
        of_ranks = f" ({format_bytes(plan.rank_disk_bytes)} for each of {plan.ranks} ranks)" if plan.ranks > 1 else ""
        tiers.append(f"disk {format_bytes(plan.disk_bytes)} {how} {plan.directory}{of_ranks}")
    return f"prefix cache, pages of {plan.page_tokens} tokens: {', '.join(tiers)}"


def lack_of_room(plan: CachePlan, longest_tokens: int) -> str | None:
    """A warning about a host tier too small for the longest prefix, or None. `longest_tokens`: of a request."""
    longest = min(longest_tokens, plan.device_tokens)
    room = plan.host_tokens - plan.device_tokens
    if plan.disk_bytes == 0 or room >= longest // plan.page_tokens * plan.page_tokens:
        return None
    return (
        f"prefix cache: the host tier has {room} tokens more than the device tier: longer prefixes (up to {longest} "
        "tokens are possible) may not come back from the disk while the device tier is full; --cache-host "
        f"{format_bytes((plan.device_tokens + longest) * plan.token_bytes)} takes the longest"
    )
