"""The native step beside SGLang's modules, in SGLang's own scheduler: which models, and what compares the two."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from reference import lora
from reference.instruction_sets import instruction_sets
from reference.parity import tiny_deepseek_v2
from reference.resident.scheduler import Engine

from kt_runtime.adapters import AdapterTensors
from kt_runtime.experts.attention import Sequences
from kt_runtime.experts.step import NO_LORA, BatchLora
from kt_runtime.serve.models.presets import Preset, load_preset
from kt_runtime.sglang_patch.cpu import step as native_step
from kt_runtime.sglang_patch.delta import step as delta_step
from kt_runtime.sglang_patch.lora.install import drop_adapter, install_adapter
from kt_runtime.sglang_patch.store import expert_store

LENGTHS = (1, 2, 7, 33, 64, 150)  # in chunks of 64 tokens and pages of 8
QWEN3, DEEPSEEK_V3, DEEPSEEK_V2 = load_preset("tiny-qwen3-moe"), load_preset("tiny-deepseek-v3"), tiny_deepseek_v2()
PADDED = {"vocab_size": 767}  # SGLang pads the embedding to a multiple of 64 rows
OTHER_QWEN3 = {"attention_bias": True, "norm_topk_prob": False, "num_key_value_heads": 1, **PADDED}
KIMI_K2 = {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}
WITH_QUERY_RANK = {"q_lora_rank": 48, "v_head_dim": 24, "first_k_dense_replace": 2, "n_shared_experts": 2}
AIR = {"use_qk_norm": False, "partial_rotary_factor": 0.25, "routed_scaling_factor": 1.0, "n_shared_experts": 2}
UNSHARED_KEYS = {"linear_num_key_heads": 4, "num_key_value_heads": 1, **PADDED}  # a key head for each value head
MAVERICK = {"use_qk_norm": False, "rope_scaling": None, "attn_temperature_tuning": False, "attention_chunk_size": 64}
# As transformers writes it: null is one group.
UNGROUPED = {"topk_method": "greedy", "n_group": None, "topk_group": None, "routed_scaling_factor": 1.0}
# preset, changes of the model's configuration, dtype, arguments of the expert store
CASES: dict[str, tuple[Preset, dict[str, Any], str, dict[str, str]]] = {
    "float32": (QWEN3, {}, "float32", {}),
    "float32, int8 experts": (QWEN3, {}, "float32", {"expert_format": "int8"}),
    "bfloat16, int4 experts": (QWEN3, {}, "bfloat16", {"expert_format": "int4"}),
    "bfloat16, biases, one key head": (QWEN3, OTHER_QWEN3, "bfloat16", {}),
    **{f"bfloat16, {isa}": (QWEN3, {}, "bfloat16", {"isa": isa}) for isa in instruction_sets()},
    "DeepSeek-V3, float32": (DEEPSEEK_V3, {}, "float32", {}),
    **{f"DeepSeek-V3, bfloat16, {isa}": (DEEPSEEK_V3, {}, "bfloat16", {"isa": isa}) for isa in instruction_sets()},
    "Kimi-K2, bfloat16, int4 experts": (DEEPSEEK_V3, KIMI_K2, "bfloat16", {"expert_format": "int4"}),
    "Kimi-K2, float32": (DEEPSEEK_V3, KIMI_K2, "float32", {}),
    "Mixtral, bfloat16": (load_preset("tiny-mixtral"), {}, "bfloat16", {}),
    "OLMoE, bfloat16": (load_preset("tiny-olmoe"), {}, "bfloat16", {}),
    "GLM-4.5, bfloat16": (load_preset("tiny-glm4-moe"), {}, "bfloat16", {}),
    "GLM-4.5-Air, bfloat16": (load_preset("tiny-glm4-moe"), AIR, "bfloat16", {}),
    "MiniMax-M2, bfloat16": (load_preset("tiny-minimax-m2"), {}, "bfloat16", {}),
    "gpt-oss, float32": (load_preset("tiny-gpt-oss"), {}, "float32", {}),
    **{
        f"gpt-oss, bfloat16, {isa}": (load_preset("tiny-gpt-oss"), {}, "bfloat16", {"isa": isa})
        for isa in instruction_sets()
    },
    "Llama 4, bfloat16": (load_preset("tiny-llama4"), {}, "bfloat16", {}),
    "Llama 4 as Maverick, bfloat16": (load_preset("tiny-llama4"), MAVERICK, "bfloat16", {}),
    **{
        f"{name}, {dtype}{'' if isa is None else f', {isa}'}": (
            load_preset(preset),
            {},
            dtype,
            {} if isa is None else {"isa": isa},
        )
        for name, preset in (("Qwen3-Next", "tiny-qwen3-next"), ("Qwen3.5", "tiny-qwen3-5-moe-text"))
        for dtype, isa in [("float32", None), *(("bfloat16", isa) for isa in instruction_sets())]
    },
    "Qwen3-Next, bfloat16, a key head for each value head": (
        load_preset("tiny-qwen3-next"),
        UNSHARED_KEYS,
        "bfloat16",
        {},
    ),
    "GLM-4.7-Flash, bfloat16": (load_preset("tiny-glm4-moe-lite"), {}, "bfloat16", {}),
    "DeepSeek-V3.2, float32": (load_preset("tiny-deepseek-v32"), {}, "float32", {}),
    **{
        f"DeepSeek-V3.2, bfloat16, {isa}": (load_preset("tiny-deepseek-v32"), {}, "bfloat16", {"isa": isa})
        for isa in instruction_sets()
    },
    "GLM-5.2, float32": (load_preset("tiny-glm-moe-dsa"), {}, "float32", {}),
    "GLM-5.2, bfloat16": (load_preset("tiny-glm-moe-dsa"), {}, "bfloat16", {}),
    "DeepSeek-V2, bfloat16": (DEEPSEEK_V2, {}, "bfloat16", {}),
    "DeepSeek-V2, float32, one group": (DEEPSEEK_V2, UNGROUPED, "float32", {}),
    "DeepSeek-V2, bfloat16, compressed queries": (DEEPSEEK_V2, WITH_QUERY_RANK, "bfloat16", {}),
    "DeepSeek-V2, float32, compressed queries": (DEEPSEEK_V2, WITH_QUERY_RANK, "float32", {}),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SINGLE_CASES: dict[str, tuple[Preset, dict[str, Any], str, dict[str, str]]] = {  # of single tests
    f"{dtype}, YaRN": (QWEN3, {"rope_scaling": YARN}, dtype, {}) for dtype in ("float32", "bfloat16")
}


class Both:
    """Takes the place of the program: every batch runs on the step, on a step with three threads, and on SGLang's
    modules, whose result is returned. `different`: batches that differ; `modes` and `adapters` (how many): of the
    batches."""

    def __init__(self, runner: Any, program: native_step.Program) -> None:
        self.model, self.pool, self.has_moved = program.model, runner.token_to_kv_pool, program.has_moved
        self.states = States(runner)
        self.no_adapters = program.no_adapters
        with mock.patch.object(expert_store(), "num_threads", 3):
            self.programs = [program, native_step._program_of(runner)]
        self.different: list[str] = []
        self.modes: list[tuple[str, int]] = []
        self.adapters: list[int] = []

    def run(self, ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        mode = batch.forward_mode.name
        if mode == "EXTEND" and any(map(is_decode, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu)):
            mode = "MIXED"
        self.modes.append((mode, len(batch.seq_lens)))
        self.adapters.append(len(set(batch.lora_ids) - {None}))
        self._wipe(batch)  # also what no layer writes: columns for index keys in layers that share an indexer
        found = []
        for program in self.programs:
            with self.states.restored(batch):
                found.append(self._results(batch, program.run(ids, positions, batch)))
        hidden = type(self.model).forward.__wrapped__(self.model, ids, positions, batch)
        expected = self._results(batch, hidden, wipe=False)
        for threads, tensors in zip((1, 3), found, strict=True):
            if not all(same_bits(a, b) for a, b in zip(tensors, expected, strict=True)):
                self.different.append(f"{mode} of {len(ids)} tokens, {threads} threads")
        return hidden

    def _results(self, batch: Any, hidden: torch.Tensor, *, wipe: bool = True) -> list[torch.Tensor]:
        """Hidden states, the new keys and values, which are then wiped from the pool, and the sequences' states."""
        tensors = [hidden.clone(), *(buffer[batch.out_cache_loc].clone() for buffer in buffers_of(self.pool))]
        tensors += self.states.of(batch)
        if wipe:
            self._wipe(batch)
        return tensors

    def _wipe(self, batch: Any) -> None:
        for buffer in buffers_of(self.pool):
            buffer[batch.out_cache_loc] = 9.0


class States:
    """Those of a batch's sequences in Gated DeltaNet layers; none in a model without such layers."""

    def __init__(self, runner: Any) -> None:
        self._requests = runner.req_to_token_pool
        pool = getattr(self._requests, "mamba_pool", None)
        self._buffers = [] if pool is None else [*pool.mamba_cache.conv, pool.mamba_cache.temporal]

    def of(self, batch: Any) -> list[torch.Tensor]:
        if not self._buffers:
            return []
        slots = self._slots(batch)
        return [buffer[:, slots].clone() for buffer in self._buffers]

    @contextmanager
    def restored(self, batch: Any) -> Iterator[None]:
        """The states are afterwards as before."""
        before = self.of(batch)
        yield
        for buffer, kept in zip(self._buffers, before, strict=True):
            buffer[:, self._slots(batch)] = kept

    def _slots(self, batch: Any) -> torch.Tensor:
        slots: torch.Tensor = self._requests.get_mamba_indices(batch.req_pool_indices)
        return slots.long()


def attention_of(model: Any) -> Any:
    """The first module of SGLang's decoder stack that attends to keys: the step takes its scaling and rotary table."""
    return next(iter(delta_step.attending_layers(model).values()))


def run_step(program: native_step.Program, batch: tuple[Any, ...], lora: BatchLora = NO_LORA) -> Any:
    """Ids, positions, slots and sequences on the step alone. States of sequences lie in the first slots."""
    ids, positions, slots, sequences = batch
    has_states = any(hasattr(layer, "linear_attn") for layer in program.model.layers)
    states = torch.arange(len(sequences.rows)) if has_states else None
    return program._step.run(ids, positions, slots, sequences, lora, states=states)


def buffers_of(pool: Any) -> list[torch.Tensor]:
    return [buffer for layer in native_step.kv_buffers(pool) for buffer in layer]


def is_decode(prefix: int, new: int) -> bool:
    return prefix > 0 and new == 1


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(), expected.nan_to_num())


def prompt(length: int, first: int = 3) -> list[int]:
    return [first + (7 * place) % 600 for place in range(length)]


def answers(served: Engine) -> dict[str, tuple[list[int], list[float]]]:
    return {rid: (tokens, served.logprobs.get(rid, [])) for rid, tokens in served.tokens.items()}


def answers_to_all(served: Engine) -> dict[str, tuple[list[int], list[float]]]:
    served.clear()
    served.run(*(served.request(f"r{length}", prompt(length, length)) for length in LENGTHS))
    return answers(served)


def adapter(served: Engine, rank: int, seed: int, only: Collection[str] = ()) -> AdapterTensors:
    return lora.random_adapter(served.config, rank=rank, alpha=10 / 3, seed=seed, only=only)


@contextmanager
def installed(served: Engine, **adapters: AdapterTensors) -> Iterator[Any]:
    """In SGLang's LoRA manager, under their names."""
    manager = served.scheduler.tp_worker.model_runner.lora_manager
    for name, tensors in adapters.items():
        install_adapter(manager, served.config, name, name, f"content of {name}", tensors)
    try:
        yield manager
    finally:
        for name in adapters:
            drop_adapter(manager, name)


def small_batch(rows: tuple[int, ...] = (0, 2, 0, 0), **changes: list[int]) -> tuple[Any, ...]:
    """Two tokens of one sequence; the slots 8 and 9 are free in an engine at rest."""
    values = {"ids": [3, 4], "positions": [0, 1], "slots": [8, 9]} | changes
    table = torch.tensor([[8, 9, 10], [8, -1, 10]], dtype=torch.int32)
    tensors = (torch.tensor(values[name]) for name in ("ids", "positions", "slots"))
    return (*tensors, Sequences(torch.tensor([rows]), table))
