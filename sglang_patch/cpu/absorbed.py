"""The products of absorbed latent attention (MLA) with the halves of `kv_b_proj` on a CPU, by kt-runtime's kernels.

Symbol: `sglang.srt.models.deepseek_common.deepseek_weight_loader.DeepseekV2WeightLoaderMixin.post_load_weights` (SGLang
0.5.23) derives `w_kc` and `w_vc`, which `forward_mla` multiplies with `torch.bmm`. Afterwards both are `HeadWeights`,
which computes this product. Reason: `torch.bmm` sums in an order that depends on the number of tokens, so a token
decoded alone would get other bits than in a prefill or in training. The twin calls the same function
(`kt_runtime.ops.matmul.frozen_heads`). The memory of both stays as it is: rows of a linear layer for each head.
"""

from __future__ import annotations

from typing import Any

import torch

from kt_runtime.experts import dense
from kt_runtime.sglang_patch.hooks import Hooks

SYMBOLS = ("sglang.srt.models.deepseek_common.deepseek_weight_loader.DeepseekV2WeightLoaderMixin.post_load_weights",)
WEIGHTS = ("w_kc", "w_vc")


def install(hooks: Hooks) -> None:
    if hooks.on_cpu:
        hooks.after(SYMBOLS[0], _mark_weights)


def weights(model: Any) -> dict[str, torch.Tensor]:
    """`w_kc` [N, key, latent] and `w_vc` [N, latent, value] of each layer of a model with absorbed attention, by name.

    They are attributes, not parameters. SGLang copies into them when it loads weights again.
    """
    found = {}
    for index, layer in enumerate(model.model.layers):
        for name in WEIGHTS:
            weight = getattr(getattr(layer, "self_attn", None), name, None)
            if isinstance(weight, torch.Tensor):
                found[f"model.layers.{index}.self_attn.{name}"] = weight.as_subclass(torch.Tensor)
    return found


class HeadWeights(torch.Tensor):
    """[N, K, O]: a matrix for each head. `torch.bmm` of x [N, T, K] with it is kt-runtime's; all else is torch's."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.bmm and type(args[1]) is HeadWeights:
                return _multiply(args[0], args[1].as_subclass(torch.Tensor), **(kwargs or {}))
            return func(*args, **(kwargs or {}))


def _multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [N, T, K], weight [N, K, O] -> [N, T, O], a view of [T, N, O]."""
    if not dense.is_supported(x, weight.mT):
        return torch.bmm(x, weight, out=out)
    tokens = x.transpose(0, 1)
    return dense.linear_heads(tokens, weight.mT, None if out is None else out.transpose(0, 1)).transpose(0, 1)


def _mark_weights(result: None, model: Any, *args: Any, **kwargs: Any) -> None:
    for layer in model.model.layers:
        attention = getattr(layer, "self_attn", None)
        for name in WEIGHTS:
            weight = getattr(attention, name, None)
            if type(weight) is torch.Tensor:
                setattr(attention, name, weight.as_subclass(HeadWeights))
