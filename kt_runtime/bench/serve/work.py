"""The least work of a prompt or of a decode step: bytes from DRAM and operations, from the model's config.

Bytes: every dense matrix once, without the embedding's table; each routed expert that a token takes, once; of a decode
step also the KV of all sequences, and of each stream's adapter the matrices that its token takes. Operations: two for
a multiply-add; the head for one token of each sequence; attention over the tokens that a token sees, in a layer with a
sliding window those in it. A Gated DeltaNet layer reads and writes its state for each token of a decode step; each
number of the state takes three multiply-adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from kt_runtime.bench.experts.limits import Work
from kt_runtime.bench.options import DTYPE_BYTES
from kt_runtime.families import EXPERTS, family_for, gguf
from kt_runtime.families.base import integer
from kt_runtime.serve.memory.plan import cached_numbers_per_token, expert_formats, layer_bytes
from kt_runtime.serve.models.checkpoint import dense_tensors


@dataclass(frozen=True)
class ModelWork:
    """Sizes of one model that is served in one dtype.

    `dense_parameters`, `dense_bytes`: of the matrices that every token is multiplied with, without the head; the bytes
    are those in memory, where matrices of a GGUF file stay packed. `expert_path`: whose peak limits the experts, "bf16"
    or "int8". `expanded_pair_ops`, `absorbed_pair_ops`: operations of attention for one pair of tokens in all layers,
    absorbed for MLA that does not expand keys and values. `adapter_parameters`: of the adapter's matrices that one
    token takes, for rank 1. `windows`: of each layer that attends to earlier tokens; 0: it sees all. `state_numbers`,
    `state_bytes`: of one sequence in all Gated DeltaNet layers, the first without the convolution's inputs.
    """

    dtype_bytes: int
    dense_parameters: int
    dense_bytes: int
    head_parameters: int
    head_bytes: int
    moe_layers: int
    num_experts: int
    top_k: int
    expert_bytes: float
    expert_parameters: int
    expert_path: str
    kv_token_bytes: int
    expanded_pair_ops: int
    absorbed_pair_ops: int
    adapter_parameters: int
    windows: tuple[int, ...]
    state_numbers: int
    state_bytes: int

    def expected_experts(self, tokens: int) -> float:
        """Distinct experts in a layer if each of `tokens` takes `top_k` at random."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** tokens)

    def prefill(self, tokens: int) -> Work:
        """A prompt that is computed from the start; the answer's first token included."""
        operations = self._operations(tokens, 1)
        operations["bf16"] += self._mean_over_layers(tokens, _pairs) * self.expanded_pair_ops
        return Work(self._weight_bytes(self.expected_experts(tokens)), operations)

    def decode(self, streams: int, context: float, experts: float, adapter_rank: int = 0) -> Work:
        """A step of `streams` sequences with `context` cached tokens each (a mean), and `experts` distinct experts in a
        layer (a mean). `adapter_rank`: of every stream's own adapter; 0: no adapters."""
        operations = self._operations(streams, streams)
        adapters = streams * adapter_rank * self.adapter_parameters
        seen = self._mean_over_layers(context, min)
        operations["bf16"] += streams * seen * self.absorbed_pair_ops + 2 * adapters
        cached = streams * (seen * self.kv_token_bytes + 2 * self.state_bytes)
        return Work(self._weight_bytes(experts) + cached + adapters * self.dtype_bytes, operations)

    def native_step(self, streams: int, context: float, experts: float) -> Work:
        """`decode` without the head, which the native step leaves to SGLang's modules."""
        whole = self.decode(streams, context, experts)
        operations = whole.operations | {"bf16": whole.operations["bf16"] - 2.0 * streams * self.head_parameters}
        return Work(whole.weight_bytes - self.head_bytes, operations)

    def _weight_bytes(self, experts: float) -> float:
        return self.dense_bytes + self.head_bytes + self.moe_layers * experts * self.expert_bytes

    def _mean_over_layers(self, tokens: float, count: Callable[[float, float], float]) -> float:
        """The mean of `count(tokens, window)`; a layer without a window has one of `tokens`."""
        return sum(count(tokens, window or tokens) for window in self.windows) / len(self.windows)

    def _operations(self, tokens: int, outputs: int) -> dict[str, float]:
        operations = {"bf16": 2.0 * (tokens * self.dense_parameters + outputs * self.head_parameters)}
        operations["bf16"] += tokens * 3 * 2.0 * self.state_numbers
        experts = 2.0 * tokens * self.moe_layers * self.top_k * self.expert_parameters
        operations[self.expert_path] = operations.get(self.expert_path, 0.0) + experts
        return operations


def _pairs(tokens: float, window: float) -> float:
    """Number of pairs of one of `tokens` tokens and a token that it sees, itself included."""
    within = min(tokens, window)
    return within * (within + 1) / 2 + (tokens - within) * within


def model_work(config: Mapping[str, Any], dtype: str) -> ModelWork:
    """Raises as `family_for`."""
    family = family_for(config)
    num_experts, hidden, intermediate = family.expert_shape(config)
    _, held = expert_formats(config, None)
    is_table = {"model.embed_tokens.weight", "lm_head.weight"}
    dense = {tensor.name: tensor.shape for tensor in dense_tensors(config) if tensor.name not in is_table}
    head = {"lm_head.weight": (integer(config, "vocab_size"), hidden)}
    packed = gguf.packed_tensors(config)
    expanded, absorbed = _pair_operations(config)
    of_dtype, of_float32 = family.state_numbers(config)
    return ModelWork(
        dtype_bytes=DTYPE_BYTES[dtype],
        dense_parameters=sum(map(prod, dense.values())),
        dense_bytes=_held_bytes(dense, packed, dtype),
        head_parameters=prod(head["lm_head.weight"]),
        head_bytes=_held_bytes(head, packed, dtype),
        moe_layers=len(family.moe_layers(config)),
        num_experts=num_experts,
        top_k=family.num_experts_per_tok(config),
        expert_bytes=layer_bytes(config, held) / num_experts,
        expert_parameters=3 * hidden * intermediate,
        expert_path="bf16" if held.encoding in ("bf16", "fp8_e4m3") else "int8",
        kv_token_bytes=cached_numbers_per_token(config) * DTYPE_BYTES[dtype],
        expanded_pair_ops=expanded,
        absorbed_pair_ops=absorbed,
        adapter_parameters=_adapter_parameters(config),
        windows=_windows(config),
        state_numbers=of_float32,
        state_bytes=of_dtype * DTYPE_BYTES[dtype] + of_float32 * 4,
    )


def _held_bytes(shapes: Mapping[str, tuple[int, ...]], packed: Mapping[str, str], dtype: str) -> int:
    """`packed`: GGUF types of the matrices that stay quantized."""
    return sum(
        gguf.packed_bytes(packed[name], *shape) if name in packed else prod(shape) * DTYPE_BYTES[dtype]
        for name, shape in shapes.items()
    )


def _windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    family, layers = family_for(config), integer(config, "num_hidden_layers")
    if family.attending_layers(config) < layers:  # a layer without keys has no window either
        return (0,) * family.attending_layers(config)
    return tuple(family.window(config, layer) for layer in range(layers))


def _pair_operations(config: Mapping[str, Any]) -> tuple[int, int]:
    layers, heads = family_for(config).attending_layers(config), integer(config, "num_attention_heads")
    if config.get("kv_lora_rank"):
        latent, rope = integer(config, "kv_lora_rank"), integer(config, "qk_rope_head_dim")
        nope, value = integer(config, "qk_nope_head_dim"), integer(config, "v_head_dim")
        expanded, absorbed = nope + rope + value, 2 * latent + rope
    else:
        head_dim = config.get("head_dim") or integer(config, "hidden_size") // heads
        expanded = absorbed = 2 * int(head_dim)
    return 2 * layers * heads * expanded, 2 * layers * heads * absorbed


def _adapter_parameters(config: Mapping[str, Any]) -> int:
    family = family_for(config)
    top_k = family.num_experts_per_tok(config)
    return sum(
        (module.in_features + module.out_features) * (top_k if module.group == EXPERTS else 1)
        for module in family.lora_modules(config)
    )
