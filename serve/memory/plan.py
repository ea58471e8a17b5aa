"""The memory that a model needs for serving and training, compared with the free memory.

The need is computed from config.json alone, before anything is loaded. Attention and dense weights have the server's
dtype, even if the checkpoint has them quantized; experts have the checkpoint's format, or the one they are quantized
to. The sizes of SGLang's pools follow SGLang 0.5.23: latent attention caches kv_lora_rank + qk_rope_head_dim numbers
per token and layer, with an indexer index_head_dim more; grouped-query attention 2 * num_key_value_heads * head_dim.
Estimates are labelled as such.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.families import gguf
from kt_runtime.families.base import EXPERTS, LoraModule, integer
from kt_runtime.families.quantization import (
    BF16,
    BLOCK_ROWS,
    QUANTIZED_WHILE_LOADING,
    ExpertFormat,
    quantization_of,
)
from kt_runtime.families.registry import family_for
from kt_runtime.serve.memory.graphs import graph_bytes
from kt_runtime.serve.models.checkpoint import count_parameters, dense_tensors
from kt_runtime.serve.options.cache_plan import CachePlan

Device = Literal["cpu", "gpu"]

GIB = 2**30
# Three Python processes with torch and SGLang imported. Measured with a tiny model on CPUs: 0.75 to 0.9 GiB each, with
# shared memory divided among the processes.
PROCESSES_BYTES = 5 * GIB // 2
RANK_BYTES = 3 * GIB // 4  # of each further rank
# `kt-runtime train` for a job of the fine-tuning API, with tokenizer and datasets; jobs run one after the other.
TRAINER_BYTES = 4 * GIB // 5
# The most pages that SGLang's `prepare_mha_write_back_staging` keeps on the GPU.
STAGED_PAGES = 64
# CUDA's context, and the workspaces of cuBLAS and of the attention kernels, in SGLang's scheduler process.
CONTEXT_BYTES = 5 * GIB // 4
# Rows that pinned buffers hold for experts on the CPU: SGLang's chunk of a prefill on a large GPU.
STAGED_TOKENS = 8192
NO_GRAPHS = "--no-graphs"
NO_JOBS = "--finetuning-dir off"
CONTEXT_TOKENS = "--context-tokens"
TO_GIVE = (NO_GRAPHS, NO_JOBS)
# fp32 master weight, gradient and both moments of AdamW.
TRAINED_PARAMETER_BYTES = 4 * 4


@dataclass(frozen=True, slots=True)
class ServingShape:
    """The server's settings that determine memory. `device`: of attention and dense layers; experts are on the CPU.

    `lora_memory_bytes`: of the adapters in slots together, None: no limit.
    `lora_targets`: last names of the adapted modules (`q_proj`, ...), None for all that the family can adapt.
    `session_memory_bytes`: the limit of all training sessions, None: none is stated.
    `activation_bytes`: of an activation and a number in the KV cache, 2 for bf16, 4 for float32. `training_tokens`: of
    one microbatch. `expert_format`: the format that experts are quantized to during loading, None: no quantization.
    `cache`: the prefix cache's tiers. `route_bytes`: of the routes that a rank keeps. `tokens_option`: the option that
    sets the KV cache's size. `gpu_expert_bytes`: of hot experts on the GPU; `gpu_scratch_bytes`: of their dequantized
    weights. `ring_chunk_experts`: experts of a chunk of the ring that streams experts to the GPU, 0: no ring;
    `ring_bytes`: of its slots; `streamed_bytes`: of a streamed call's other tensors. `runs_jobs`: the
    fine-tuning API is on. `context_tokens`: of the longest sequence; None: the model's. `graph_requests`,
    `graph_prefill_tokens`: of the largest graphs that SGLang captures; 0: none. `state_slots`: of the pool of linear
    attention's states, for a model that has it. `ranks`: processes of this host that compute the model together.
    `hosts`: over which weights and KV cache with its host tier are split evenly, but for the latents and their
    projections, which each rank has whole.
    """

    device: Device = "cpu"
    max_total_tokens: int = 8192
    activation_bytes: int = 2
    lora_slots: int = 4
    lora_memory_bytes: int | None = None
    lora_rank: int = 16
    lora_targets: Collection[str] | None = None
    training_sessions: int = 1
    session_memory_bytes: int | None = None
    training_tokens: int = 2048
    expert_format: str | None = None
    cache: CachePlan | None = None
    route_bytes: int = 0
    tokens_option: str = "--max-total-tokens"
    gpu_expert_bytes: int = 0
    gpu_scratch_bytes: int = 0
    ring_chunk_experts: int = 0
    ring_bytes: int = 0
    streamed_bytes: int = 0
    runs_jobs: bool = False
    graph_requests: int = 0
    graph_prefill_tokens: int = 0
    context_tokens: int | None = None
    state_slots: int = 0
    ranks: int = 1
    hosts: int = 1


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """`lower`: the options to lower (those of `TO_GIVE`: to give) if memory is short; empty if only a smaller model
    helps."""

    what: str
    device: Device
    size_bytes: int
    lower: tuple[str, ...] = ()


TRAINED = "trained adapters and their optimizer"
ACTIVATIONS = "training activations (estimate)"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`ring_chunk_experts`: experts of a chunk of the streaming ring, 0: no ring."""

    model: str
    needs: tuple[MemoryNeed, ...]
    ring_chunk_experts: int = 0

    def devices(self) -> list[Device]:
        return sorted({need.device for need in self.needs})

    def total_bytes(self, device: Device) -> int:
        return sum(need.size_bytes for need in self.needs if need.device == device)


def plan_memory(config: Mapping[str, Any], shape: ServingShape, model: str = "the model") -> MemoryPlan:
    """Raises what `family_for` raises, and InvalidValueError for a target that the family can't adapt."""
    device = shape.device
    counts = count_parameters(config)
    dense_bytes = counts.dense * shape.activation_bytes + (_saved_bytes(config, shape) if device == "cpu" else 0)
    stored, held = expert_formats(config, shape.expert_format)
    num_moe_layers = len(family_for(config).moe_layers(config))
    # SGLang's pools allocate one page more than their capacity.
    tokens = shape.max_total_tokens + (shape.cache.page_tokens if shape.cache else 0)
    cached_bytes = tokens * cached_numbers_per_token(config) * shape.activation_bytes
    if not config.get("kv_lora_rank"):
        cached_bytes = cached_bytes // shape.hosts
    else:  # every rank has the latents
        cached_bytes *= shape.ranks
    whole_bytes = _whole_parameters(config) * shape.activation_bytes
    slots, masters = lora_parameters(config, shape)
    needs = [
        MemoryNeed(
            "attention and dense weights",
            device,
            (dense_bytes - whole_bytes) // shape.hosts + shape.ranks * whole_bytes,
        ),
        MemoryNeed(
            "absorbed copies of kv_b_proj",
            device,
            _absorbed_parameters(config) * shape.activation_bytes // shape.hosts,
        ),
        MemoryNeed("rotary tables", device, _rotary_bytes(config, shape), (CONTEXT_TOKENS,)),
        MemoryNeed("routed experts, packed", "cpu", num_moe_layers * layer_bytes(config, held) // shape.hosts),
        MemoryNeed("one layer of experts while loading", "cpu", layer_bytes(config, stored)),
        MemoryNeed("KV cache", device, cached_bytes, (shape.tokens_option,)),
        MemoryNeed(
            "states of linear attention",
            device,
            _state_bytes(config, shape) // shape.hosts,
            ("--max-running-requests",),
        ),
        *_cache_needs(config, shape),
        _slots_need(device, slots * shape.activation_bytes, shape.lora_memory_bytes),
        _trained_need(device, masters, shape.session_memory_bytes),
        MemoryNeed("routes for routing replay", "cpu", shape.ranks * shape.route_bytes, ("--routing-replay",)),
        MemoryNeed("columns of weights for training over ranks", device, _columns_bytes(config, shape) // shape.hosts),
        MemoryNeed(ACTIVATIONS, device, shape.ranks * _activation_bytes(config, shape), ("--microbatch-tokens",)),
        *(_gpu_needs(config, shape) if device == "gpu" else ()),
        MemoryNeed("SGLang's processes (estimate)", "cpu", PROCESSES_BYTES + (shape.ranks - 1) * RANK_BYTES),
        MemoryNeed(
            "a fine-tuning job's trainer (estimate)", "cpu", TRAINER_BYTES if shape.runs_jobs else 0, (NO_JOBS,)
        ),
    ]
    return MemoryPlan(model, tuple(need for need in needs if need.size_bytes > 0), shape.ring_chunk_experts)


def _columns_bytes(config: Mapping[str, Any], shape: ServingShape) -> int:
    """Bytes, on all hosts, of the columns of split layers and of the head that ranks hold for backward in addition to
    their rows. Ranks of one host hold one layer at a time; what stays quantized is always held
    (`resident/twin/split.py`)."""
    if shape.ranks * shape.hosts == 1 or shape.training_sessions == 0:
        return 0
    kinds = gguf.packed_tensors(config) if shape.device == "cpu" else {}
    held, of_layers = 0, Counter[int]()
    head = "lm_head.weight", -1, integer(config, "vocab_size"), integer(config, "hidden_size")
    for name, layer, rows, cols in (head, *_split_matrices(config)):
        if name in kinds:
            held += gguf.packed_bytes(kinds[name], rows, cols)
        else:
            of_layers[layer] += rows * cols * shape.activation_bytes
    return held + (max(of_layers.values(), default=0) if shape.hosts == 1 else of_layers.total())


def _split_matrices(config: Mapping[str, Any]) -> Iterator[tuple[str, int, int, int]]:
    """Linear layers that ranks split, but for the head: the weight's name, its layer, rows and columns."""
    for module in family_for(config).lora_modules(config):
        if module.group != EXPERTS and not module.is_whole:
            yield f"{module.name}.weight", module.layer, module.out_features, module.in_features


def _whole_parameters(config: Mapping[str, Any]) -> int:
    """Parameters of linear layers, other than routed experts, that every rank has whole."""
    modules = family_for(config).lora_modules(config)
    return sum(
        module.in_features * module.out_features for module in modules if module.group != EXPERTS and module.is_whole
    )


def _saved_bytes(config: Mapping[str, Any], shape: ServingShape) -> int:
    """What linear layers that stay quantized take more than dequantized ones: below 0."""
    kinds = gguf.packed_tensors(config)
    if not kinds:
        return 0
    sizes = {source.name: source.shape for source in family_for(config).twin_sources(config) if source.name in kinds}
    return sum(
        gguf.packed_bytes(kinds[name], rows, cols) - rows * cols * shape.activation_bytes
        for name, (rows, cols) in sizes.items()
    )


def _slots_need(device: Device, all_slots: int, budget: int | None) -> MemoryNeed:
    if budget is not None:
        return MemoryNeed("LoRA slots", device, min(all_slots, budget), ("--lora-memory",))
    return MemoryNeed("LoRA slots", device, all_slots, ("--lora-slots", "--max-lora-rank"))


def _trained_need(device: Device, masters: int, limit: int | None) -> MemoryNeed:
    if limit is not None and limit < masters:
        return MemoryNeed(TRAINED, device, limit, ("--session-memory",))
    return MemoryNeed(TRAINED, device, masters, ("--max-lora-rank",))


def _gpu_needs(config: Mapping[str, Any], shape: ServingShape) -> list[MemoryNeed]:
    """What routed experts in CPU memory and layers on a GPU need of both memories.

    A staged call has pinned rows of hidden states, result and gradient, expert ids (int64) and routing weights.
    """
    graphs = graph_bytes(config, shape.graph_requests, shape.graph_prefill_tokens)
    of_row = 3 * integer(config, "hidden_size") * shape.activation_bytes + 12 * integer(config, "num_experts_per_tok")
    return [
        MemoryNeed("hot experts", "gpu", shape.gpu_expert_bytes, ("--gpu-experts",)),
        MemoryNeed("dequantized hot experts", "gpu", shape.gpu_scratch_bytes, ("--gpu-experts-format",)),
        MemoryNeed("ring of streamed experts", "gpu", shape.ring_bytes, ("--stream-experts",)),
        MemoryNeed("tensors of streamed calls (estimate)", "gpu", shape.streamed_bytes, ("--microbatch-tokens",)),
        MemoryNeed("captured graphs (SGLang's estimate)", "gpu", graphs, (NO_GRAPHS,)),
        MemoryNeed("context and workspaces (estimate)", "gpu", CONTEXT_BYTES),
        MemoryNeed("pinned buffers of the ring", "cpu", shape.ring_bytes),
        MemoryNeed("pinned rows for the experts", "cpu", max(STAGED_TOKENS, shape.training_tokens) * of_row),
    ]


def _cache_needs(config: Mapping[str, Any], shape: ServingShape) -> list[MemoryNeed]:
    cache = shape.cache
    if cache is None:
        return []
    # Latent attention has one tensor per layer, which SGLang copies to the host without staging on the GPU.
    is_staged = shape.device == "gpu" and not config.get("kv_lora_rank")
    staged_pages = min(STAGED_PAGES, cache.host_tokens // cache.page_tokens) if is_staged else 0
    host_bytes = cache.host_bytes * shape.ranks if config.get("kv_lora_rank") else cache.host_bytes // shape.hosts
    return [
        MemoryNeed("prefix cache's host tier", "cpu", host_bytes, ("--cache-host",)),
        MemoryNeed("pages on their way to the host tier", "gpu", staged_pages * cache.page_bytes),
        MemoryNeed("prefix cache's disk buffers and index", "cpu", cache.disk_memory_bytes, ("--cache-disk",)),
    ]


def expert_formats(config: Mapping[str, Any], quantized_to: str | None) -> tuple[ExpertFormat, ExpertFormat]:
    """(the experts' format in the checkpoint, their format in memory).

    Raises UnknownNameError for a format that experts can't be quantized to, and InvalidValueError if the checkpoint's
    experts are already integers: rounding them again would only lose accuracy.
    """
    quantization = quantization_of(config)
    stored = BF16 if quantization is None else quantization.expert_format
    if quantized_to is None:
        return stored, stored
    if quantized_to not in QUANTIZED_WHILE_LOADING:
        raise UnknownNameError("expert format", quantized_to, QUANTIZED_WHILE_LOADING, "--expert-format")
    if quantization is not None and stored.encoding not in ("bf16", "fp8_e4m3", "mxfp8"):
        kind = "4 bits" if "fp4" in stored.encoding else "integers"
        raise InvalidValueError(
            f"--expert-format {quantized_to}: this checkpoint's experts are quantized to {kind} already "
            f"({quantization.description}); leave the option out, they are held as they are"
        )
    return stored, QUANTIZED_WHILE_LOADING[quantized_to]


def layer_bytes(config: Mapping[str, Any], held: ExpertFormat) -> int:
    """Memory of one layer's routed experts, with padding."""
    family = family_for(config)
    num_experts, hidden, intermediate = family.expert_shape(config)
    of_expert = 2 * held.packed_bytes(intermediate, hidden) + held.packed_bytes(hidden, intermediate)
    if family.expert_mlp(config).has_bias:  # in float32
        of_expert += 4 * sum(-(-rows // BLOCK_ROWS) * BLOCK_ROWS for rows in (intermediate, intermediate, hidden))
    return num_experts * of_expert


def cached_numbers_per_token(config: Mapping[str, Any]) -> int:
    layers = family_for(config).attending_layers(config)
    if config.get("kv_lora_rank"):
        of_latent = integer(config, "kv_lora_rank") + integer(config, "qk_rope_head_dim")
        return layers * (of_latent + family_for(config).index_size(config))
    if config.get("head_dim"):
        head_dim = integer(config, "head_dim")
    else:
        head_dim = integer(config, "hidden_size") // integer(config, "num_attention_heads")
    key_heads = "num_attention_heads" if config.get("num_key_value_heads") is None else "num_key_value_heads"
    return layers * 2 * integer(config, key_heads) * head_dim


def _state_bytes(config: Mapping[str, Any], shape: ServingShape) -> int:
    """SGLang's pool has one slot more, for padding."""
    of_model_s_dtype, of_float32 = family_for(config).state_numbers(config)
    return (shape.state_slots + 1) * (of_model_s_dtype * shape.activation_bytes + of_float32 * 4)


def lora_parameters(config: Mapping[str, Any], shape: ServingShape) -> tuple[int, int]:
    """(parameters of all serving slots, bytes of all training sessions' masters and optimizer states)."""
    modules = family_for(config).lora_modules(config)
    if shape.lora_targets is not None:
        known = {module.projection for module in modules}
        unknown = sorted(set(shape.lora_targets) - known)
        if unknown:
            raise InvalidValueError(f"LoRA target {unknown[0]!r}: this family can adapt {', '.join(sorted(known))}")
        modules = [module for module in modules if module.projection in shape.lora_targets]
    one_adapter = sum(_matrices(module) * (module.in_features + module.out_features) for module in modules)
    one_adapter *= shape.lora_rank
    return shape.lora_slots * one_adapter, shape.training_sessions * one_adapter * TRAINED_PARAMETER_BYTES


def check_fits(plan: MemoryPlan, available_bytes: Mapping[str, int]) -> None:
    """Raises InvalidValueError that states what each device lacks and which options to lower."""
    problems = []
    for device in plan.devices():
        need, there = plan.total_bytes(device), available_bytes.get(device, 0)
        if need > there:
            problems.append(_problem(plan, device, need, there))
    if problems:
        raise InvalidValueError(f"{plan.model} does not fit: {'; '.join(problems)}")


def describe_need(plan: MemoryPlan, available_bytes: Mapping[str, int]) -> str:
    """One clause: the memory needed and free on each device."""
    return "; ".join(
        f"it needs {format_bytes(plan.total_bytes(device))} on the {device.upper()}, where "
        f"{format_bytes(available_bytes.get(device, 0))} are free"
        for device in plan.devices()
    )


def _problem(plan: MemoryPlan, device: Device, need: int, there: int) -> str:
    rows = sorted((row for row in plan.needs if row.device == device), key=lambda row: -row.size_bytes)
    parts = ", ".join(f"{row.what} {format_bytes(row.size_bytes)}" for row in rows)
    adjustable = [row for row in rows if row.lower]
    fixed = need - sum(row.size_bytes for row in adjustable)
    if fixed > there:
        advice = f"{format_bytes(fixed)} of it can't be lowered: choose a smaller model or a larger machine"
    else:
        options = dict.fromkeys(option for row in adjustable for option in row.lower)
        lower, give = (" or ".join(o for o in options if (o in TO_GIVE) == given) for given in (False, True))
        advice = ", or ".join(part for part in (lower and f"lower {lower}", give and f"give {give}") if part)
    return (
        f"it needs {format_bytes(need)} on the {device.upper()} and {format_bytes(there)} are free ({parts}); {advice}"
    )


def format_bytes(count: int) -> str:
    """Binary units with three significant digits, such as `1.25 TiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1000 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    raise AssertionError("unreachable: TiB is the last unit")


def _matrices(module: LoraModule) -> int:
    return module.num_experts if module.group == EXPERTS else 1


def _rotary_bytes(config: Mapping[str, Any], shape: ServingShape) -> int:
    """SGLang's table in float32, and copies in the activations' dtype for the native step and the training twin."""
    copies = 2 * shape.activation_bytes if shape.activation_bytes < 4 else 0
    return family_for(config).rotary_table_numbers(config, shape.context_tokens) * (4 + copies)


def _absorbed_parameters(config: Mapping[str, Any]) -> int:
    tensors = dense_tensors(config)
    return sum(tensor.num_parameters for tensor in tensors if tensor.name.endswith(".kv_b_proj.weight"))


def _activation_bytes(config: Mapping[str, Any], shape: ServingShape) -> int:
    """Bytes of one rank's activations: one hidden state per layer (checkpoints), one layer recomputed in full, and one
    chunk of logits in fp32. One of several ranks keeps its columns of the checkpoints only. It also holds, in float32,
    the outputs of its experts for all their tokens and its columns of all experts' outputs
    (`kt_runtime/ranks/experts.py`)."""
    if shape.training_sessions == 0:
        return 0
    ranks = shape.ranks * shape.hosts
    hidden, tokens = integer(config, "hidden_size"), shape.training_tokens
    family = family_for(config)
    expert_rows = family.num_experts_per_tok(config) * family.expert_intermediate(config)
    attention_rows = integer(config, "num_attention_heads") * tokens + 8 * hidden
    layer = tokens * (attention_rows + 4 * expert_rows + 4 * hidden) * 4
    checkpoints = integer(config, "num_hidden_layers") * tokens * hidden * shape.activation_bytes
    exchanged = 2 * 4 * tokens * family.num_experts_per_tok(config) * hidden // ranks if ranks > 1 else 0
    return checkpoints // ranks + layer + exchanged + 256 * integer(config, "vocab_size") * 4 * 3
