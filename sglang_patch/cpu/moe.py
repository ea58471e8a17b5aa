"""The expert store holds and computes the routed experts of SGLang's model.

Symbol (SGLang 0.5.23): `sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__` gets kt-runtime's quantization
method `StoreMethod`. Reason: SGLang's wheel has no CPU kernel for experts, and on a GPU machine experts are in host
memory. The layers stay `FusedMoE` instances without expert parameters, because SGLang's model, loader and LoRA code
expect them. Each layer gets a method `experts_forward(x, topk_output, adapters)`. A LoRA layer that wraps the layer
passes a function that returns the batch's adapters. On an accelerator the call is an eager break of SGLang's captured
graphs (`gpu/experts.py`).

`routed_scaling_factor` (DeepSeek): Hugging Face multiplies the routing weights by this factor. `StoreMethod` makes
SGLang do the same with `fuse_routed_scaling_factor_in_topk`, so the weights arrive here already scaled. `router.py` and
`gpu/shared_experts.py` keep SGLang's DeepSeek layer from multiplying a second time.

With several ranks the store holds this rank's experts, and the result is to be summed over ranks
(`kt_runtime.ranks.SharedExperts`).

Models outside the families of `kt_runtime.families` keep SGLang's own experts.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kt_runtime import device
from kt_runtime.errors import InvalidValueError, NumericsError
from kt_runtime.families import family_for
from kt_runtime.families.stack import SILU, SWIGLU_OAI, ExpertMlp, activation_of
from kt_runtime.ops.row_factors import scale_rows
from kt_runtime.sglang_patch.cpu import routes
from kt_runtime.sglang_patch.faults import finite_rows
from kt_runtime.sglang_patch.gpu import experts as on_device
from kt_runtime.sglang_patch.gpu import hot, streaming
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.ranks import group
from kt_runtime.sglang_patch.store import expert_store, keeps_experts_in_store, model_config, open_store, shared_experts

SYMBOLS = (
    "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__",
    "sglang.srt.layers.moe.token_dispatcher.StandardCombineInput",
    "sglang.srt.layers.quantization.base_config.FusedMoEMethodBase",
)

NOT_ROUTED = -1  # an expert id that the store skips


def install(hooks: Hooks) -> None:
    hooks.around(SYMBOLS[0], _with_store_method)


def _with_store_method(original: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    if kwargs.get("quant_method") is None and keeps_experts_in_store(model_config().hf_config):
        kwargs["quant_method"] = _method_class()()
    original(layer, *args, **kwargs)


def experts_forward(
    layer: Any, x: torch.Tensor, topk_output: Any, adapters: on_device.Adapters = on_device.no_adapters
) -> torch.Tensor:
    """Weighted sum of the experts that `topk_output` chose for each token: [T, H] -> [T, H], with x's dtype and device.

    `adapters`: LoRA of routed experts. During serving, a row that is not finite yields zeros and is noted
    (`finite_rows`); otherwise such a row raises NumericsError.
    """
    ids, weights = topk_output.topk_ids, topk_output.topk_weights
    if layer.moe_runner_config.apply_router_weight_on_input:
        x, weights = scale_rows(x, weights[:, 0].float()), torch.ones_like(weights)
    compute = partial(_compute, layer.layer_id)
    if not device.is_host(x):
        return on_device.forward(compute, x, ids, weights, adapters)
    routes.note(layer.layer_id, ids)
    slots, token_slots = adapters(x.shape[0])
    return compute(x, ids, weights, slots, token_slots)


def _compute(
    layer_id: int,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    slots: Sequence[Any],
    token_slots: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`slots`, `token_slots` and `out` as in `ExpertLayer.forward`."""
    if (shared := shared_experts(layer_id)) is not None:
        forward = shared.forward
    else:
        forward = partial(expert_store().layers[layer_id].forward, out=out)
    try:
        return forward(x, ids, weights, slots=slots, token_slots=token_slots)
    except NumericsError:
        notes = finite_rows.present()
        if notes is None:
            raise
    bad = ~(torch.isfinite(x).all(-1) & torch.isfinite(weights).all(-1))
    notes.note_rows(bad)
    x, weights, ids = (
        matrix.masked_fill(bad[:, None], value) for matrix, value in ((x, 0), (weights, 0), (ids, NOT_ROUTED))
    )
    return forward(x, ids, weights, slots=slots, token_slots=token_slots)


def _method_class() -> type:
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
    from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase

    class StoreMethod(FusedMoEMethodBase):
        """Gives the layer a method `experts_forward` instead of weights."""

        fuse_routed_scaling_factor_in_topk = True

        def create_weights(self, layer: Any, num_experts: int, *args: Any, **kwargs: Any) -> None:
            _check_layer(layer, num_experts)
            layer.experts_forward = types.MethodType(experts_forward, layer)

        def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
            """Creates none: SGLang then treats `apply` as the method's own kernel, with standard routing output."""

        def process_weights_after_loading(self, layer: Any) -> None:
            config = model_config()
            store = open_store(config.model_path)
            values = config.hf_config.to_dict()
            hot.attach(store, config.dtype)
            streaming.attach(store, config.dtype, family_for(values).num_experts_per_tok(values))

        def apply(self, layer: Any, dispatch_output: Any) -> Any:
            out = layer.experts_forward(dispatch_output.hidden_states, dispatch_output.topk_output)
            return StandardCombineInput(hidden_states=out)

    return StoreMethod


def described_mlp(config: Any, has_bias: bool) -> ExpertMlp:
    """What SGLang's `MoeRunnerConfig` says that an expert computes. Raises UnknownNameError for an activation that the
    expert store has not."""
    if config.gemm1_alpha is not None and config.gemm1_clamp_limit is not None and config.activation == SILU:
        return ExpertMlp(SWIGLU_OAI, config.gemm1_clamp_limit, config.gemm1_alpha, has_bias)
    found = activation_of({"hidden_act": config.activation, "swiglu_limit": config.swiglu_limit})
    return replace(found, has_bias=has_bias)


def _check_layer(layer: Any, num_experts: int) -> None:
    """Raises InvalidValueError unless SGLang's layer computes what the family's table says, with whole experts.

    `num_experts`: of this rank.
    """
    config, values = layer.moe_runner_config, model_config().hf_config.to_dict()
    family = family_for(values)
    table = family.expert_mlp(values)
    found = described_mlp(config, bool(layer.with_bias))
    for name in ("activation", "limit", "alpha", "has_bias"):
        if getattr(found, name) != getattr(table, name):
            raise InvalidValueError(
                f"{layer.layer_name}: {name} is {getattr(found, name)!r} in SGLang; the expert store's experts have "
                f"{getattr(table, name)!r}"
            )
    expected = {"apply_router_weight_on_input": family.weighs_input, "is_gated": table.has_gate, "no_combine": False}
    for name, value in expected.items():
        if getattr(config, name) != value:
            raise InvalidValueError(
                f"{layer.layer_name}: {name} is {getattr(config, name)!r}; the expert store has {value!r}"
            )
    ranks = group.num_ranks()
    if layer.moe_ep_size != ranks or layer.moe_tp_size != 1 or layer.num_experts != ranks * num_experts:
        raise InvalidValueError(
            f"{layer.layer_name}: {layer.num_experts} experts are split {layer.moe_ep_size} times, and each of them "
            f"{layer.moe_tp_size} times; the expert store of one of {ranks} ranks holds as large a part of them, whole"
        )
    if layer.num_fused_shared_experts:
        raise InvalidValueError(f"{layer.layer_name}: start the server with --disable-shared-experts-fusion")
