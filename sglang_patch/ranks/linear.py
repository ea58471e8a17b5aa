"""Linear layers behind attention heads and behind SwiGLU are split by their outputs, over ranks.

SGLang 0.5.23 symbols: `layers.linear.RowParallelLinear.__init__`, `.forward`, `lora.layers.RowParallelLinearWithLoRA
.forward`; `lora.mem_pool.LoRAMemoryPool.get_lora_A_shape` and `.get_lora_B_shape`. Reason: SGLang splits these layers
by their inputs, and ranks add up partial sums: a sum over inputs then has another order than in one process. Here each
rank gets the inputs of all, and has some rows of the weight. All other layers that SGLang splits, it splits by outputs.

SGLang's layer boundaries add up the ranks' results; `Share.placed` makes that sum exact. A layer that adds them up
itself (OLMoE's) gives the whole result here. A layer's group is then None, by which SGLang means one rank: it adds the
layer's bias, of which each rank has its rows, on every rank, and sums nothing up.

`configs.update_config.update_intermediate_size`: not used with several ranks. On CPUs it pads widths in the config to
multiples of 32 for each rank, for kernels of SGLang's. Experts are whole on their rank, so LoRA's buffers then do not
fit them (64 units, four ranks). Widths that ranks do not divide are refused before (`serve/ranks.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kt_runtime.errors import InvalidValueError
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.ranks import group

POOL = "sglang.srt.lora.mem_pool.LoRAMemoryPool"
SYMBOLS = (
    "sglang.srt.layers.linear.RowParallelLinear.__init__",
    "sglang.srt.layers.linear.RowParallelLinear.forward",
    "sglang.srt.lora.layers.RowParallelLinearWithLoRA.forward",
    f"{POOL}.get_lora_A_shape",
    f"{POOL}.get_lora_B_shape",
    f"{POOL}._dense_local_dim",
    "sglang.srt.configs.update_config.update_intermediate_size",
)
SPLIT_BY_OUTPUTS = ("o_proj", "out_proj", "down_proj")
"""Modules whose LoRA kt-runtime splits by outputs: A is whole on every rank, B has the rank's rows."""
NOT_SPLIT = ("kv_a_proj_with_mqa",)
"""Every rank has all outputs, which SGLang knows of the layer, but not of its LoRA (`lora/whole_queries.py`)."""


def install(hooks: Hooks) -> None:
    init, forward, forward_with_lora, a_shape, b_shape = SYMBOLS[:5]
    if hooks.on_cpu:
        hooks.around(init, split_by_outputs)
        hooks.around(forward, forward_of_all_inputs)
        hooks.around(forward_with_lora, forward_of_all_inputs)
        hooks.after(a_shape, whole_a)
        hooks.after(b_shape, own_rows_of_b)
        hooks.around(SYMBOLS[-1], keep_width)


def keep_width(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    return config if group.num_ranks() > 1 else original(config, *args, **kwargs)


def split_by_outputs(original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
    """The layer's parameter has as many elements as SGLang's: [outputs / N, inputs], not [outputs, inputs / N].

    Raises InvalidValueError for a layer that gets the inputs of all ranks, or is not split.
    """
    original(layer, *args, **kwargs)
    exchange = group.exchange()
    if exchange is None:
        return
    if not layer.input_is_parallel or layer.tp_group is None:
        raise InvalidValueError(
            f"a layer of {layer.output_size} outputs can't be split over ranks: input_is_parallel "
            f"{layer.input_is_parallel}, tp_group {layer.tp_group}"
        )
    rows = exchange.share.of(layer.output_size, "outputs")
    weight = layer.weight
    weight.data = weight.data.view(len(rows), layer.input_size)
    weight.weight_loader = partial(_load_rows, rows)
    if layer.bias is not None:
        layer.bias.data = layer.bias.data[: len(rows)].clone()
        layer.bias.weight_loader = weight.weight_loader
    layer.kt_outputs, layer.output_size = layer.output_size, len(rows)
    layer.output_partition_sizes, layer.input_size_per_partition = [len(rows)], layer.input_size
    layer.tp_group = None


def _load_rows(rows: range, parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    """loaded [outputs, inputs], or a bias [outputs]."""
    parameter.data.copy_(loaded[rows.start : rows.stop])


def forward_of_all_inputs(
    original: Callable[..., Any], layer: Any, input_: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """SGLang's forward, with and without LoRA: [T, inputs / N] -> [T, outputs], whole or to be summed over ranks."""
    exchange = group.exchange()
    if exchange is None:
        return original(layer, input_, *args, **kwargs)
    plain = getattr(layer, "base_layer", layer)
    columns, bias = original(layer, exchange.all_columns(input_), *args, **kwargs)
    if plain.reduce_results:
        return exchange.all_columns(columns), bias
    return exchange.share.placed(columns, plain.kt_outputs), bias


def whole_a(
    shape: tuple[int, ...], pool: Any, module_name: str, base_model: Any, max_lora_dim: int, layer_idx: int
) -> tuple[int, ...]:
    """[slots, R, inputs] of SGLang's [slots, R, inputs / N]; of a `down_proj` SGLang may have asked the layer."""
    is_whole = module_name not in SPLIT_BY_OUTPUTS
    if is_whole or pool._dense_local_dim(module_name, base_model, layer_idx, "input") is not None:
        return shape
    return (*shape[:-1], shape[-1] * group.num_ranks())


def own_rows_of_b(shape: tuple[int, ...], pool: Any, module_name: str, *args: Any, **kwargs: Any) -> tuple[int, ...]:
    """[slots, outputs / N, R] of SGLang's [slots, outputs, R]; of a layer that is not split the other way round."""
    ranks = group.num_ranks()
    if module_name in NOT_SPLIT:
        return shape[0], shape[1] * ranks, shape[2]
    return (shape[0], shape[1] // ranks, shape[2]) if module_name in SPLIT_BY_OUTPUTS else shape
