"""The options of `kt-runtime serve`, checked as far as possible without a model."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from kt_runtime.errors import ConflictError, InvalidValueError, UnknownNameError, suggestion
from kt_runtime.families.quantization import QUANTIZED_WHILE_LOADING
from kt_runtime.serve.options.cache_plan import CachePlan
from kt_runtime.wire.settings import checked

DTYPES = ("bfloat16", "float32")
LORA_RANKS = (64, 32, 16, 8)
"""The default of `--max-lora-rank` (the first), and lower ranks to try if memory is short."""

LOWEST_VALUES = {
    "max_total_tokens": 16,
    "max_running_requests": 1,
    "max_lora_rank": 1,
    "lora_slots": 2,
    "context_tokens": 16,
    "tp_size": 1,
    "nnodes": 1,
    "node_rank": 0,
    "expert_threads": 1,
    "microbatch_tokens": 1,
    "max_adapters": 1,
    "max_adapter_disk_bytes": 1 << 20,
    "max_sessions": 1,
    "tinker_timeout_s": 5,
    "session_memory_bytes": 1 << 20,
    "lora_memory_bytes": 1 << 20,
    "cache_device_bytes": 0,
    "cache_host_bytes": 0,
    "cache_disk_bytes": 0,
    "cache_page_tokens": 1,
    "gpu_experts_bytes": 0,
    "routing_replay_bytes": 0,
    "max_body_bytes": 1024,
}
LARGEST_PAGE_TOKENS = 1024
STREAMING = ("auto", "off")
"""Values of `--stream-experts` other than a number of tokens."""
Pins = Mapping[int, tuple[int, ...]]
"""Layer -> its experts that a placement file pins to the device."""
GpuExpertsFormat = Literal["auto", "published", "model"]
GPU_EXPERTS_FORMATS = get_args(GpuExpertsFormat)
NOT_OPTIONS = ("passed_on", "cache", "lora_rank_may_be_lower", "pinned_experts")
OPTION_NAMES = {
    "max_body_bytes": "max-body-size",
    "max_adapter_disk_bytes": "max-adapter-disk",
    "cors_origins": "cors-origin",
    "tinker_timeout_s": "tinker-timeout",
}  # options whose name differs from the field's
SERVED_NAME = re.compile(r"[A-Za-z0-9._/-]{1,200}")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """`max_total_tokens`: of the prefix cache and all running requests together. `context_tokens`: None: the model's.

    `device`: "cpu", or a GPU such as "cuda:1" or "cuda", the first; None: a GPU if there is one (`serve.devices`).
    `lora_slots`: adapter versions in one batch; the base takes one slot. `lora_memory_bytes`: of adapters in slots, or
    None: any that the slots need (`serve.memory.server.with_lora_slots`).
    `adapter_dir`: None: this model's directory in the user's data directory.
    `max_adapters`: names of adapters at once; `max_adapter_disk_bytes`: of files in their directory; None: any.
    `registry`: a directory or URL, of the adapters that several servers share (`serve.registry`); None: none.
    `expert_isa`, `expert_threads`: None: the best available.
    `tp_size`: ranks, processes that compute the model together (`serve.ranks`). `nnodes`: hosts that they run on,
    `node_rank`: this host, `dist_init_addr`: HOST:PORT of host 0 (`serve.hosts`).
    `expert_format`: the format that a bf16 or fp8 checkpoint's experts are quantized to during loading; None: none.
    `no_step`: SGLang's modules compute the decoder stack on a CPU, not the native step.
    `no_graphs`: an accelerator captures no graphs; for debugging.
    `exact`: the server ends with status 2 if training's log-probabilities may differ from served ones.
    `placement`: a KTransformers rule file, which may set `expert_format` and `pinned_experts`.
    `gpu_experts_bytes`: size of the hot experts' slots and buffers on the device, 0: none. `gpu_experts_format`: how
    slots hold them: one of GPU_EXPERTS_FORMATS. `pinned_experts`: layer -> experts that always have a slot.
    `stream_experts`: calls of at least so many tokens compute their experts on the device; "auto": a measured number,
    "off": none.
    `routing_replay_bytes`: memory for the routes of served tokens, 0: they are not kept (`serve.memory.routes`).
    `max_lora_rank`: every slot is allocated for this rank. `lora_rank_may_be_lower`: lower the rank if memory is short.
    `tpot_target_ms`, `ttft_target_ms`: times per output token and to the first token that serving keeps while training
    runs; None: no target. `train_share`: the largest share of time for training while requests are served.
    `max_sessions`: training sessions open at once; `session_memory_bytes`: their memory limit together, None: their
    part of the memory plan and half of the unplanned memory.
    `tinker_timeout_s`: after this silence a Tinker client has gone, and its session ends.
    `finetuning_dir`: where the fine-tuning API keeps files and jobs; None: in the adapter directory, "off": there is no
    such API.
    `client_keys`: a file with keys of clients and their limits (`serve.http.client_keys`).
    `allow_no_key`: listen beyond this machine without a key. `cors_origins`: sites whose pages may call the server.
    `max_body_bytes`: None: from the context length. `any_model_name`: an unknown model name means the model.
    `served_model_name`: the model's name for clients; None: its preset's, hub's or directory's name.
    `tool_call_parser`, `reasoning_parser`: SGLang's names, "none" for none; None: the model's own (`parsers`).
    `runtime_dir`: directory of sockets and log; None: the user's. `verbose`: SGLang's whole log goes to the terminal.
    `passed_on`: options for SGLang.

    `cache_device_bytes`: size of the KV cache, instead of `max_total_tokens`. `cache_host_bytes`: None: 0, or the size
    that a disk tier needs. `cache_dir`: None: this model's directory in the user's cache directory. `cache_read_only`:
    read pages from the disk, write none. `cache_page_tokens`: None: a default for the tiers. `cache`: the plan that
    `launch` computes from these options for the model; None: only SGLang's own prefix cache.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = field(default=None, repr=False)
    client_keys: Path | None = None
    allow_no_key: bool = False
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int | None = None
    any_model_name: bool = False
    dtype: str = "bfloat16"
    context_tokens: int | None = None
    max_total_tokens: int = 16384
    max_running_requests: int = 32
    max_lora_rank: int = LORA_RANKS[0]
    lora_rank_may_be_lower: bool = False
    lora_slots: int = 8
    lora_memory_bytes: int | None = None
    adapter_dir: Path | None = None
    max_adapters: int | None = None
    max_adapter_disk_bytes: int | None = None
    registry: str | None = None
    expert_isa: str | None = None
    expert_threads: int | None = None
    tp_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    expert_format: str | None = None
    placement: Path | None = None
    no_step: bool = False
    no_graphs: bool = False
    exact: bool = False
    device: str | None = None
    tpot_target_ms: float | None = None
    ttft_target_ms: float | None = None
    train_share: float = 0.5
    microbatch_tokens: int = 2048
    served_model_name: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    max_sessions: int = 64
    session_memory_bytes: int | None = None
    tinker_timeout_s: float = 120.0
    finetuning_dir: str | None = None
    runtime_dir: Path | None = None
    verbose: bool = False
    passed_on: tuple[str, ...] = ()
    cache_device_bytes: int | None = None
    cache_host_bytes: int | None = None
    cache_disk_bytes: int = 0
    cache_dir: Path | None = None
    cache_read_only: bool = False
    cache_page_tokens: int | None = None
    cache: CachePlan | None = None
    gpu_experts_bytes: int = 0
    gpu_experts_format: GpuExpertsFormat = "auto"
    pinned_experts: Pins = field(default_factory=dict)
    stream_experts: str = "auto"
    routing_replay_bytes: int = 0

    def __post_init__(self) -> None:
        """Raises InvalidValueError for a value outside its range, UnknownNameError for an unknown format."""
        if self.dtype not in DTYPES:
            raise InvalidValueError(f"--dtype {self.dtype!r}{suggestion(self.dtype, DTYPES)}")
        if not 0 < self.port < 65536:
            raise InvalidValueError(f"--port {self.port}: allowed are 1 to 65535")
        for name in ("tpot_target_ms", "ttft_target_ms", "train_share"):
            checked(name, getattr(self, name), f"--{name.replace('_', '-')}")
        if self.expert_format is not None and self.expert_format not in QUANTIZED_WHILE_LOADING:
            raise UnknownNameError("expert format", self.expert_format, QUANTIZED_WHILE_LOADING, "--expert-format")
        if self.stream_experts not in STREAMING and not re.fullmatch(r"[1-9][0-9]{0,8}", self.stream_experts):
            raise InvalidValueError(
                f"--stream-experts {self.stream_experts!r}: allowed are auto, off, or a number of tokens, 1 or more"
            )
        if self.gpu_experts_format not in GPU_EXPERTS_FORMATS:
            raise UnknownNameError("format", self.gpu_experts_format, GPU_EXPERTS_FORMATS, "--gpu-experts-format")
        if self.gpu_experts_format != "auto" and not self.gpu_experts_bytes:
            raise InvalidValueError(
                f"--gpu-experts-format {self.gpu_experts_format}: no experts are kept on the GPU; "
                "--gpu-experts SIZE keeps some"
            )
        for name, lowest in LOWEST_VALUES.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                option = OPTION_NAMES.get(name) or name.removesuffix("_bytes").replace("_", "-")
                raise InvalidValueError(f"--{option} {value}: must be at least {lowest}")
        if self.served_model_name is not None and not SERVED_NAME.fullmatch(self.served_model_name):
            raise InvalidValueError(
                f"--served-model-name {self.served_model_name!r}: allowed are letters, digits and . _ - / "
                "(a colon stands before an adapter's name in a request)"
            )
        self._check_cache()

    def _check_cache(self) -> None:
        page = self.cache_page_tokens
        if page is not None and (page > LARGEST_PAGE_TOKENS or page & (page - 1)):
            allowed = ", ".join(str(2**power) for power in range(LARGEST_PAGE_TOKENS.bit_length()))
            raise InvalidValueError(f"--cache-page-tokens {page}: allowed are {allowed}")
        if not self.cache_disk_bytes:
            for name in ("cache_dir", "cache_read_only"):
                if getattr(self, name):
                    raise InvalidValueError(
                        f"--{name.replace('_', '-')}: there is no disk tier; set its size with --cache-disk"
                    )

    @property
    def asks_for_cache(self) -> bool:
        """Whether any size of the prefix cache's tiers is given."""
        sizes = (self.cache_device_bytes, self.cache_page_tokens)
        return any(size is not None for size in sizes) or bool(self.cache_host_bytes or self.cache_disk_bytes)

    @property
    def streaming(self) -> Literal["auto", "off"] | int:
        """`stream_experts` as the resident takes it."""
        if self.stream_experts == "auto":
            return "auto"
        return "off" if self.stream_experts == "off" else int(self.stream_experts)

    @property
    def url(self) -> str:
        """The server's URL for programs on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        scheme = "https" if any(one.partition("=")[0] == "--ssl-certfile" for one in self.passed_on) else "http"
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"


def own_option_names() -> list[str]:
    """The options of `kt-runtime serve` that set fields of ServeOptions."""
    names = [field.name for field in fields(ServeOptions) if field.name not in NOT_OPTIONS]
    return [f"--{OPTION_NAMES.get(name) or name.removesuffix('_bytes').replace('_', '-')}" for name in names]


def check_port_is_free(host: str, port: int) -> None:
    """Binds the port and releases it, before the long loading of a model. Another program may still take the port."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InvalidValueError(f"--host {host!r}: is no address of this machine ({error})") from None
    with socket.socket(family, socket.SOCK_STREAM) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind(address)
        except OSError as error:
            raise _refusal(error, host, port) from None


def _refusal(error: OSError, host: str, port: int) -> Any:
    if error.errno == errno.EADDRINUSE:
        return ConflictError(f"port {port} on {host} is in use by another program; choose another with --port")
    if error.errno == errno.EACCES:
        return InvalidValueError(f"--port {port}: this user may not listen there; choose one above 1023")
    return InvalidValueError(f"--host {host!r}: can't listen there ({error.strerror})")
