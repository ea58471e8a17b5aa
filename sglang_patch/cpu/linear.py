"""Linear layers and the head on a CPU with kt-runtime's kernels, which read SGLang's parameters in place.

Symbols (SGLang 0.5.23): `layers.quantization.unquant.UnquantizedLinearMethod.apply` computes every linear layer that is
not quantized, with and without LoRA around it. `layers.logits_processor.LogitsProcessor._compute_lm_head` computes
logits. Reason: PyTorch's products sum in an order that depends on the number of tokens in a batch. A token decoded
alone then gets other numbers than in a prefill or in training, and in bf16 sometimes other experts. The training twin
calls the same function (`kt_runtime.experts.dense`).

SGLang keeps layers whose weights it has packed for AMX, and the head in float32 (`--enable-fp32-lm-head`). A head that
stays quantized (`packed.py`) is kt-runtime's in either case.
"""

from __future__ import annotations

from typing import Any

import torch

from kt_runtime.experts import dense
from kt_runtime.experts.packed.weight import PackedWeight
from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = (
    "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
    "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
)


def install(hooks: Hooks) -> None:
    if hooks.on_cpu:
        hooks.around(SYMBOLS[0], apply_linear)
        hooks.around(SYMBOLS[1], compute_logits)


def apply_linear(
    original: Any, method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., K] -> [..., N] in x's dtype."""
    if not _is_packed(layer) and dense.is_supported(x, layer.weight):
        return dense.linear(x, layer.weight, bias)
    result: torch.Tensor = original(method, layer, x, bias)
    return result


def compute_logits(
    original: Any, processor: Any, hidden: torch.Tensor, head: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """hidden [T, H] -> logits [T, V] in the head's dtype; SGLang converts them to float32 afterwards."""
    if isinstance(getattr(head, "weight", None), PackedWeight):
        wanted = torch.float32 if processor.use_fp32_lm_head else head.weight.dtype
        return dense.linear(hidden.to(wanted), head.weight)
    if _is_plain(processor, head):
        rounded = hidden.to(head.weight.dtype)
        if dense.is_supported(rounded, head.weight):
            return dense.linear(rounded, head.weight)
    result: torch.Tensor = original(processor, hidden, head, *args, **kwargs)
    return result


def _is_packed(layer: Any) -> bool:
    return bool(getattr(layer, "use_intel_amx_backend", False))


def _is_plain(processor: Any, head: Any) -> bool:
    """Whether SGLang would multiply by `head.weight` in its own dtype: no LoRA, no quantization, no other precision."""
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method

    has_lora = hasattr(head, "set_lora") and hasattr(head, "apply_lora")
    if has_lora or _is_packed(head) or not hasattr(head, "weight"):
        return False
    if should_apply_lm_head_quant_method(head, getattr(head, "quant_method", None)):
        return False
    return not processor.use_fp32_lm_head and processor.rl_on_policy_target is None
