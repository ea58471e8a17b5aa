"""Builds SGLang's command line for `kt-runtime serve`.

Symbol: `sglang.srt.server_args.ServerArgs.add_cli_args` (SGLang 0.5.23), used for its option names and its checks only.

Reasons for the fixed options: shared experts must not be fused into the routed experts, which the expert store holds.
Strict LoRA loading turns an unknown key into an error. An idle scheduler sleeps and keeps no core busy
(`resident/turns.py` wakes it for training). `/metrics` is on, and OpenAI's `usage` includes the number of cached prompt
tokens.
SGLang sees a quantized checkpoint as unquantized: the expert store holds the experts, and `cpu/weights.py` dequantizes
all other tensors. `unquant` keeps SGLang from detecting fp8 weights.

Graphs: on an accelerator SGLang captures breakable graphs of decode steps and of prefills up to `GRAPH_PREFILL_TOKENS`;
the experts are an eager break (`gpu/experts.py`). A full graph can't hold them. Decode sizes end with the server's most
running requests. Longer prefills run without a graph: their experts take much longer than their launches. A CPU has no
graphs.

Overlapped scheduling (`--disable-overlap-schedule` is always given). The device would allow it: SGLang's forward stream
waits for the scheduler's before each batch, and training could wait for the forward stream in turn; an adapter's slot
is written in the forward stream's order. Four things on the host do not:

- The host computes the experts, so it is busy for nearly the whole of a batch. Only the scheduler's work could overlap,
  and only with the end of a batch: the last layer's sum, head and sampling.
- Results of a batch would be read after the next one has been launched, which takes a whole step of the host, and after
  a training turn in between. Every token would reach its client that much later, and each request that ends would take
  part in one more step, whose experts the CPU reads for nothing.
- `faults/batches.py` takes a failed batch apart and computes its requests again. It requires that no result of an
  earlier batch is outstanding: a request would be put back to the queue with a token in flight.
- `faults/finite_rows.py` reads each step's logits on the host before sampling, which waits for the device.

Ranks: routed experts are split by expert (`--ep-size`), all else by heads and outputs. No grammars: their processes end
in their own time on each rank, and ranks must see the same masks.

Sliding windows (`ONE_POOL`): SGLang would give their layers a KV pool of their own, with a radix tree that frees what
has left the window. The cache's tiers, its pages and their versions know one pool for all layers (SGLang refuses the
tiers for two), so the layers share it, and a window is a mask.

Reasons for the cache's options: the host pool's "page first" layout keeps a page contiguous, as the disk tier needs it.
`cache/host_copies.py` implements `direct` copies without CUDA; `kernel` copies are SGLang's for a GPU. Every page is
written through as soon as it is computed. A request waits for the disk, because recomputing takes longer. If the disk
hangs, the disk tier's own timeout ends before SGLang's timeout for the disk tier.
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
from kt_runtime.sglang_patch.delta.states import state_arguments
from kt_runtime.sglang_patch.models.sparse_options import refuse_options
from kt_runtime.sglang_patch.options import ACCELERATOR_ATTENTION, ATTENTION_BACKEND

SYMBOLS = ("sglang.srt.server_args.ServerArgs.add_cli_args",)
ALWAYS = (
    *("--disable-overlap-schedule", "--disable-shared-experts-fusion"),
    *("--enable-lora", "--lora-strict-loading", "--sleep-on-idle", "--enable-metrics", "--enable-cache-report"),
)
GRAPH_OPTIONS = "--cuda-graph-"
GRAPH_PREFILL_TOKENS = 512
NO_GRAPHS = ("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled")
NOT_QUANTIZED = ("--quantization", "unquant")
ONE_POOL = "--disable-hybrid-swa-memory"
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
# --max-total-tokens bounds the token pool. SGLang also requires that weights and pool fit into this share of memory.
# The experts count as used memory and may take nearly all of it.
CPU_MEMORY_SHARE = 0.95
HOST, NVIDIA = "cpu", "cuda"
NO_PARSER = "none"


class Cache(Protocol):
    """The prefix cache's tiers; `serve.memory.cache_plan.CachePlan`. A size of 0 means that there is no such tier.

    `host_ratio`: tokens of the host pool divided by tokens of the device pool, adjusted for SGLang's rounding.
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
    """The user's options; `serve.options.named.ServeOptions`. `lora_slots`: adapters per batch, including the base.

    `device`: "cpu", or an accelerator with its index; None: what this process has.
    """

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def device(self) -> str | None: ...
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
    def tp_size(self) -> int: ...
    @property
    def nnodes(self) -> int: ...
    @property
    def node_rank(self) -> int: ...
    @property
    def dist_init_addr(self) -> str | None: ...
    @property
    def cache(self) -> Cache | None: ...
    @property
    def no_graphs(self) -> bool: ...
    @property
    def tool_call_parser(self) -> str | None: ...
    @property
    def reasoning_parser(self) -> str | None: ...
    @property
    def passed_on(self) -> Sequence[str]: ...
    @property
    def cache_page_tokens(self) -> int | None: ...
    @property
    def cache_disk_bytes(self) -> int: ...


class Model(Protocol):
    """The model; `serve.models.report.ResolvedModel`. `config` is the content of its config.json."""

    @property
    def name(self) -> str: ...
    @property
    def directory(self) -> Path: ...
    @property
    def config(self) -> Mapping[str, Any]: ...


def server_arguments(options: Options, model: Model, *, on_cpu: bool | None = None) -> list[str]:
    """Arguments for SGLang's parser, with the user's own SGLang options last. `on_cpu`: None asks `options`.

    Raises UnknownNameError for a model of no known family, InvalidValueError for a variant that can't be served, and
    for options of graphs where there are none.
    """
    kind, _, index = _device(options, on_cpu).partition(":")
    on_cpu, has_cuda_kernels = kind == HOST, kind == NVIDIA
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
        "lora-backend": "csgmv" if has_cuda_kernels else "torch_native",
    }
    if options.context_tokens is not None:
        values["context-length"] = options.context_tokens
    if on_cpu:
        values |= {"device": HOST, "attention-backend": ATTENTION_BACKEND, "mem-fraction-static": CPU_MEMORY_SHARE}
    else:
        values |= {"device": kind, "base-gpu-id": index or 0}
        if not has_cuda_kernels:
            values["attention-backend"] = ACCELERATOR_ATTENTION
    if options.tp_size > 1:
        values |= {"tp-size": options.tp_size, "ep-size": options.tp_size}
    if options.nnodes > 1:
        values |= {"nnodes": options.nnodes, "node-rank": options.node_rank}
        values |= {"dist-init-addr": str(options.dist_init_addr)}
    cache = options.cache
    if cache is not None:
        values |= {"max-total-tokens": cache.device_tokens, "page-size": cache.page_tokens}
    tiers = _tiers(cache, model, has_cuda_kernels) if cache is not None and cache.host_tokens else []
    family = family_for(model.config)
    targets = family.sglang_lora_targets(model.config)
    refuse_options(options, family, on_cpu)
    fixed = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    fixed += [*state_arguments(options, family, on_cpu), *_parsers(options), *_graphs(options, kind)]
    seen = config_options(model.config)
    return [*fixed, *ALWAYS, *tiers, *seen, "--lora-target-modules", *targets, *options.passed_on]


def config_options(config: Mapping[str, Any]) -> list[str]:
    """Where SGLang must see another config.json than the checkpoint's: unquantized, and with the keys that it reads
    and transformers 5 does not write."""
    family = family_for(config)
    changed = family.missing_keys(config)
    has_windows = any(family.window(config, layer) for layer in range(int(config["num_hidden_layers"])))
    options = [ONE_POOL] if has_windows else []
    if quantization_of(config) is not None:
        options += NOT_QUANTIZED
        changed |= dict.fromkeys(CONFIG_KEYS)
    return [*options, "--json-model-override-args", json.dumps(changed)] if changed else options


def _graphs(options: Options, kind: str) -> Sequence[str]:
    """`kind`: of the device. SGLang's graphs are CUDA's."""
    given = next((text for text in options.passed_on if text.startswith(GRAPH_OPTIONS)), None)
    why = "--no-graphs excludes it" if options.no_graphs else ""
    if kind != NVIDIA:
        why = "there is no accelerator, and a CPU has no graphs" if kind == HOST else f"{kind} has no graphs"
    if why and given is not None:
        raise InvalidValueError(f"{given} can't be passed on to SGLang: {why}")
    if why:
        return NO_GRAPHS
    prefill_tokens = min(GRAPH_PREFILL_TOKENS, options.max_total_tokens)
    return (
        *("--cuda-graph-backend-decode=breakable", f"--cuda-graph-max-bs-decode={options.max_running_requests}"),
        *("--cuda-graph-backend-prefill=breakable", f"--cuda-graph-max-bs-prefill={prefill_tokens}"),
    )


def _parsers(options: Options) -> list[str]:
    values = {"--tool-call-parser": options.tool_call_parser, "--reasoning-parser": options.reasoning_parser}
    return [text for name, value in values.items() if value not in (None, NO_PARSER) for text in (name, str(value))]


def _tiers(cache: Cache, model: Model, has_cuda_kernels: bool) -> list[str]:
    if model.config.get("index_topk") and not family_for(model.config).chooses_keys:
        raise InvalidValueError(
            f"--cache-host: {model.name} has sparse attention (index_topk {model.config['index_topk']}), whose index "
            "is kept beside the keys and values; the cache's tiers have room for these only"
        )
    copies, layout = ("kernel", "page_first") if has_cuda_kernels else ("direct", "page_first_direct")
    values: dict[str, object] = {
        "hicache-ratio": cache.host_ratio,
        "hicache-io-backend": copies,
        "hicache-mem-layout": layout,
    }
    if cache.disk_bytes:
        # A look-up takes microseconds, so prefetching pays off from one page on.
        extra = {**DISK_BACKEND, "prefetch_threshold": cache.page_tokens}
        values |= {"hicache-storage-backend": "dynamic", "hicache-storage-backend-extra-config": json.dumps(extra)}
    return [*CACHE_TIERS, *(text for name, value in values.items() for text in (f"--{name}", str(value)))]


def option_names() -> frozenset[str]:
    """Every option of SGLang's server, with its leading dashes."""
    parser = _parser()
    return frozenset(name for action in parser._actions for name in action.option_strings)


def check_given(options: Options) -> None:
    """Raises InvalidValueError with the message of SGLang's own parser if it refuses the user's SGLang options."""
    _parser().parse_args(["--model-path", "checked", *_parsers(options), *options.passed_on])


class _Parser(argparse.ArgumentParser):
    """Raises an error where argparse would print its usage (500 options) and end the process."""

    def error(self, message: str) -> NoReturn:
        raise InvalidValueError(f"an option of SGLang's: {message}")


def _parser() -> _Parser:
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(add_help=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser


def _device(options: Options, on_cpu: bool | None) -> str:
    """ "cpu", or the kind of an accelerator, with its index if the options name one."""
    if on_cpu is None and options.device is None:
        from kt_runtime import device

        found = device.accelerator()
        return HOST if found is None else found.type
    if on_cpu is None:
        return str(options.device)
    return HOST if on_cpu else options.device or NVIDIA
