"""The native step of a model, from its family's table and the engine's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kt_runtime.errors import InvalidValueError, NotFoundError, suggestion
from kt_runtime.experts import ExpertStore
from kt_runtime.experts.dense import DTYPES
from kt_runtime.experts.step import LoraPool, Step, StepLayer
from kt_runtime.families.stack import DecoderStack


def build_step(
    stack: DecoderStack,
    tensors: Mapping[str, torch.Tensor],
    experts: ExpertStore,
    pool: Sequence[tuple[torch.Tensor, torch.Tensor]],
    angles: torch.Tensor,
    scaling: float,
    lora: LoraPool | None = None,
) -> Step:
    """`tensors`: the engine's, by its names. `pool`: keys and values of each layer [S, K, D]. `angles` [P, D]: cosines,
    then sines of each position. `scaling`: of the queries. `lora`: the engine's LoRA pool. The step's threads and
    instruction set are the experts'.

    NotFoundError: a tensor of the table is missing. InvalidValueError: one does not fit.
    """
    scalars = {
        name: getattr(stack, name) for name in ("heads", "key_heads", "head_size", "top_k", "normalises", "epsilon")
    }
    layers = [
        StepLayer(
            input_norm=_tensor(tensors, layer.input_norm),
            qkv=_tensor(tensors, layer.qkv),
            qkv_bias=None if layer.qkv_bias is None else _tensor(tensors, layer.qkv_bias),
            query_norm=_tensor(tensors, layer.query_norm),
            key_norm=_tensor(tensors, layer.key_norm),
            keys=keys,
            values=values,
            out=_tensor(tensors, layer.out),
            out_bias=None if layer.out_bias is None else _tensor(tensors, layer.out_bias),
            post_norm=_tensor(tensors, layer.post_norm),
            gate=_tensor(tensors, layer.gate),
            experts=experts.layers[layer.experts],
        )
        for layer, (keys, values) in zip(stack.layers, pool, strict=True)
    ]
    whole = {
        "embedding": _tensor(tensors, stack.embedding),
        "final_norm": _tensor(tensors, stack.final_norm),
        "angles": angles,
    }
    return Step({**scalars, "scaling": scaling}, whole, layers, lora, isa=experts.isa, num_threads=experts.num_threads)


def _tensor(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in tensors:
        raise NotFoundError(f"the engine has no tensor {name!r}{suggestion(name, tensors)}")
    if tensors[name].dtype not in DTYPES:
        raise InvalidValueError(f"{name} is {tensors[name].dtype}; allowed: {' or '.join(map(str, DTYPES))}")
    return tensors[name].detach()
