"""Whether an adapter is too small for any forward pass to overflow through it, from its tensors' largest elements.

The probe (`probe.py`) reads half of the model's experts to find an overflow that only absurd weights can cause. Nearly
every adapter is far below that, and a few numbers show it.

A norm precedes every adapted linear but `o_proj`, `out_proj` and `down_proj`. RMSNorm gives |x| <= sqrt(K) max|w|, and
so

    |s B A x| <= s R max|B| sqrt(K) max|A| sqrt(K) max|w|          R rank, K inputs, w the norm's weight

bounds the adapter's part of an output. If it is at most `LARGEST_PART`, and the model's own part too, then an output
is at most twice that, `LARGEST_OUTPUT`. `o_proj` gets averages of such outputs, `down_proj` products of two (gate and
up), `out_proj` of Gated DeltaNet such an output times a normalised vector: at most `LARGEST_PRODUCT`.

The hidden state is the sum of the two linears of each of L layers, each again with the model's part and the adapter's.
If the adapter's are at most S, the next norm's sum of squares over H elements is at most (4 L S)^2 H. S is such that
this is `LARGEST_SQUARES`, a thirtieth of what float32 holds: routing weights may add up to more than 1. S is
1.5 * 10^14 for the 61 layers of DeepSeek-V3. bfloat16 has the same range.

The model's own part is not checked: outputs of usable models are below 10^4, and a model beyond 10^5 is not saved by
refusing an adapter.
"""

from __future__ import annotations

import math

import torch

from kt_runtime.adapters import AdapterTensors
from kt_runtime.adapters.tensors import Contents
from kt_runtime.families import LoraModule
from kt_runtime.families.base import Config
from kt_runtime.resident.twin.model import Twin

LARGEST_PART = 1e5
LARGEST_OUTPUT = 2 * LARGEST_PART
LARGEST_PRODUCT = LARGEST_OUTPUT**2
LARGEST_SQUARES = 1e37

BEHIND_NORMS = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "gate_proj"),
        *("up_proj", "in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj_ba", "in_proj_b", "in_proj_a"),
    )
)
NORMS_OF_A_LAYER = ("input_layernorm", "post_attention_layernorm")


class Bounds:
    """`largest_weight`: the largest weight of all the model's norms, plus 1 for norms that add it; None if the bounds
    don't hold for this model: float16, or a layer without its two norms."""

    def __init__(self, twin: Twin, config: Config) -> None:
        self._modules: dict[str, LoraModule] = {module.name: module for module in twin.family.lora_modules(config)}
        norms = {name: view for name, view in twin.views().items() if "norm" in name}
        needed = [f"model.layers.{i}.{norm}.weight" for i in range(twin.num_layers) for norm in NORMS_OF_A_LAYER]
        holds = twin.dtype in (torch.float32, torch.bfloat16) and all(name in norms for name in needed)
        self.largest_weight = 1 + max(float(view.abs().max()) for view in norms.values()) if holds else None
        hidden = norms[needed[0]].numel() if holds else 1
        self._largest_summand = math.sqrt(LARGEST_SQUARES / hidden) / (4 * twin.num_layers)

    def exclude_overflow(self, adapter: AdapterTensors, contents: Contents) -> bool:
        """`contents`: of every tensor of `adapter`. False: the adapter may or may not overflow."""
        if self.largest_weight is None:
            return False
        return all(self._is_small(self._modules[name], adapter, contents) for name in adapter.modules)

    def _is_small(self, module: LoraModule, adapter: AdapterTensors, contents: Contents) -> bool:
        assert self.largest_weight is not None
        a, b = (contents[f"{module.name}.lora_{letter}"].largest for letter in "AB")
        gain = adapter.scaling * adapter.rank * a * b * module.in_features  # per unit of the largest input
        if module.projection in BEHIND_NORMS:
            return gain * self.largest_weight <= LARGEST_PART
        largest_input = LARGEST_OUTPUT if module.projection == "o_proj" else LARGEST_PRODUCT
        return gain * largest_input <= self._largest_summand
