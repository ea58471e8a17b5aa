"""SGLang's command line for a server of ours.

Symbol: `sglang.srt.server_args.ServerArgs.add_cli_args` (SGLang 0.5.23), read for the names of its options only.

Why each fixed option: training runs between two batches of the scheduler, so batches must not overlap, and CUDA graphs
would hide the model from it. Shared experts must not be fused into the routed ones, which are the expert store's.
Strict LoRA loading makes a key that SGLang does not know an error. An idle scheduler sleeps, instead of keeping a core
busy (`turns.py` wakes it for training). `/metrics` answers, and OpenAI's `usage` says how much of a prompt was cached.
A quantized checkpoint is no quantized model to SGLang: experts are the store's, and `weights.py` dequantizes the rest;
`unquant` keeps SGLang from looking for fp8 weights by itself.

Why the cache's: a page of the host pool in one piece of memory ("page first") is what a disk wants. `direct` copies are
those that `cache_host_copies.py` has for a CPU; `kernel` ones are SGLang's for a GPU. Every page is written down as
soon as it is computed. A request waits for the disk, since computing again takes longer; the disk tier gives up on a
disk that hangs before SGLang gives up on the disk tier.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from kt_runtime.errors import InvalidValueError
from kt_runtime.families import family_for
from kt_runtime.families.quantization import CONFIG_KEYS, quantization_of
from kt_runtime.sglang_patch.platform import ATTENTION_BACKEND

SYMBOLS = ("sglang.srt.server_args.ServerArgs.add_cli_args",)
ALWAYS = (
    *("--disable-overlap-schedule", "--disable-shared-experts-fusion"),
    *("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"),
    *("--enable-lora", "--lora-strict-loading", "--sleep-on-idle", "--enable-metrics", "--enable-cache-report"),
)
NOT_QUANTIZED = (
    *("--quantization", "unquant"),
    *("--json-model-override-args", json.dumps(dict.fromkeys(CONFIG_KEYS))),
)
CACHE_TIERS = (
    *("--enable-hierarchical-cache", "--hicache-write-policy", "write_through"),
    *("--hicache-storage-prefetch-policy", "timeout"),
)
DISK_BACKEND = {
    "backend_name": "kt-runtime",
    "module_path": "kt_runtime.sglang_patch.cache.backend",
    "class_name": "DiskBackend",
    "interface_v1": 1,
    "prefetch_timeout_base": 3.0,
    "prefetch_timeout_per_ki_token": 1.0,
    "hicache_storage_pass_prefix_keys": True,
}
# The token pool is bounded by --max-total-tokens. SGLang also wants this share of the memory for weights and pool, and
# the experts, which may be nearly all of it, count as used.
CPU_MEMORY_SHARE = 0.95
NO_PARSER = "none"


class Cache(Protocol):
    """The prefix cache's tiers; `serve.cache.CachePlan`. 0: the tier is not there.

    `host_ratio`: the host pool's tokens by the device pool's, as SGLang's rounding needs it.
    """

    @property
    def page_tokens(self) -> int: ...
    @property
    def device_tokens(self) -> int: ...
    @property
    def host_tokens(self) -> int: ...
    @property
    def host_ratio(self) -> float: ...
    @property
    def disk_bytes(self) -> int: ...


class Options(Protocol):
    """What is asked for; `serve.options.ServeOptions`. `lora_slots`: adapters in a batch, the base is one of them."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def context_tokens(self) -> int | None: ...
    @property
    def max_total_tokens(self) -> int: ...
    @property
    def max_running_requests(self) -> int: ...
    @property
    def max_lora_rank(self) -> int: ...
    @property
    def lora_slots(self) -> int: ...
    @property
    def cache(self) -> Cache | None: ...
    @property
    def tool_call_parser(self) -> str | None: ...
    @property
    def reasoning_parser(self) -> str | None: ...
    @property
    def passed_on(self) -> Sequence[str]: ...


class Model(Protocol):
    """Which model; `serve.models.ResolvedModel`. `config` is the content of its config.json."""

    @property
    def name(self) -> str: ...
    @property
    def directory(self) -> Path: ...
    @property
    def config(self) -> Mapping[str, Any]: ...


def server_arguments(options: Options, model: Model, *, on_cpu: bool | None = None) -> list[str]:
    """Arguments for SGLang's parser; what the user passes on comes last. `on_cpu`: None asks torch.

    Raises UnknownNameError for a model of no known family, InvalidValueError for a variant that can't be served.
    """
    if on_cpu is None:
        on_cpu = not _has_cuda()
    values: dict[str, object] = {
        "model-path": model.directory,
        "served-model-name": model.name,
        "host": options.host,
        "port": options.port,
        "dtype": options.dtype,
        "max-total-tokens": options.max_total_tokens,
        "max-running-requests": options.max_running_requests,
        "max-lora-rank": options.max_lora_rank,
        "max-loras-per-batch": options.lora_slots,
        "lora-backend": "torch_native" if on_cpu else "csgmv",
    }
    if options.context_tokens is not None:
        values["context-length"] = options.context_tokens
    if on_cpu:
        values |= {"device": "cpu", "attention-backend": ATTENTION_BACKEND, "mem-fraction-static": CPU_MEMORY_SHARE}
    cache = options.cache
    if cache is not None:
        values |= {"max-total-tokens": cache.device_tokens, "page-size": cache.page_tokens}
    tiers = _tiers(cache, model, on_cpu) if cache is not None and cache.host_tokens else []
    targets = family_for(model.config).sglang_lora_targets(model.config)
    fixed = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    unquantized = NOT_QUANTIZED if quantization_of(model.config) is not None else ()
    fixed += _parsers(options)
    return [*fixed, *ALWAYS, *tiers, *unquantized, "--lora-target-modules", *targets, *options.passed_on]


def _parsers(options: Options) -> list[str]:
    values = {"--tool-call-parser": options.tool_call_parser, "--reasoning-parser": options.reasoning_parser}
    return [text for name, value in values.items() if value not in (None, NO_PARSER) for text in (name, str(value))]


def _tiers(cache: Cache, model: Model, on_cpu: bool) -> list[str]:
    if model.config.get("index_topk"):
        raise InvalidValueError(
            f"--cache-host: {model.name} has sparse attention (index_topk {model.config['index_topk']}), whose index "
            "is kept beside the keys and values; the cache's tiers have room for these only"
        )
    copies, layout = ("direct", "page_first_direct") if on_cpu else ("kernel", "page_first")
    values: dict[str, object] = {
        "hicache-ratio": cache.host_ratio,
        "hicache-io-backend": copies,
        "hicache-mem-layout": layout,
    }
    if cache.disk_bytes:
        # A look-up takes microseconds: worth it for a single page.
        extra = {**DISK_BACKEND, "prefetch_threshold": cache.page_tokens}
        values |= {"hicache-storage-backend": "dynamic", "hicache-storage-backend-extra-config": json.dumps(extra)}
    return [*CACHE_TIERS, *(text for name, value in values.items() for text in (f"--{name}", str(value)))]


def option_names() -> frozenset[str]:
    """Every option of SGLang's server, with its dashes."""
    parser = _parser()
    return frozenset(name for action in parser._actions for name in action.option_strings)


def check_given(options: Options) -> None:
    """Raises InvalidValueError with what SGLang's own parser says of what the user has given it."""
    _parser().parse_args(["--model-path", "checked", *_parsers(options), *options.passed_on])


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print its usage, 500 options of it, and end the process."""

    def error(self, message: str) -> NoReturn:
        raise InvalidValueError(f"an option of SGLang's: {message}")


def _parser() -> _Parser:
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(add_help=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
