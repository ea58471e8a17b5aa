"""Layers from GGUF files against the float64 reference on the weights that the `gguf` package reads from them.

float32 activations are multiplied exactly; bfloat16 ones are quantized to int8 by groups of 32 or 16, as for the other
integer formats (test_quantized_layers.py).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from reference import moe
from reference.expert_problems import Problem, random_problem, tensors_of
from reference.instruction_sets import instruction_sets
from reference.moe import ReferenceExperts
from torch import Tensor

from kt_runtime.bench.experts.gguf_blocks import to_blocks, write_tensors
from kt_runtime.errors import CheckpointError, InvalidValueError
from kt_runtime.experts import ExpertLayer, ExpertShape, ExpertStore
from kt_runtime.gguf_file import BLOCKS

# Of the result's norm; three times as much for gradients.
FLOAT32 = 2e-6  # 6.5e-7 measured, 1e-6 of gradients
INTEGER_ACTIVATIONS = 0.02  # as for the other integer formats; 0.0134 measured, 0.0082 of gradients
BF16_ACTIVATIONS = 2.0**-7  # factors and results are rounded; 2.3e-3 measured, 2.8e-3 of gradients
MIXED = ("Q4_K", "Q6_K")  # gate and up, down: what llama.cpp calls Q4_K_M
KINDS: dict[str, tuple[str, str]] = {
    **{kind: (kind, kind) for kind in ("BF16", "Q8_0", "Q4_0", "Q5_0", "MXFP4", "Q4_K", "Q5_K", "Q6_K")},
    **{kind: (kind, kind) for kind in ("IQ4_NL", "IQ4_XS")},
    "Q4_K_M": MIXED,
}
NAMES = {
    "BF16": "bf16",
    "Q8_0": "int8_g32",
    "Q4_0": "int4_g32",
    "Q5_0": "int5_g32",
    "MXFP4": "mxfp4_g32",
    "Q4_K": "int4k_g32",
    "Q5_K": "int5k_g32",
    "Q6_K": "int6k_g16",
    "IQ4_NL": "iq4_g32",
    "IQ4_XS": "iq4k_g32",
    "Q4_K_M": "int4k_g32+int6k_g16",
}


def blocks_of(matrices: torch.Tensor, kind: str) -> np.ndarray:
    return to_blocks(matrices.float().numpy(), kind)


def values_of(blocks: np.ndarray, kind: str) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]).astype(np.float32))


def write(directory: Path, experts: ReferenceExperts, kinds: tuple[str, str]) -> ReferenceExperts:
    """Writes the layer; returns what it stands for."""
    parts = {"gate": (experts.gate, kinds[0]), "up": (experts.up, kinds[0]), "down": (experts.down, kinds[1])}
    stored = {name: (kind, blocks_of(matrices, kind)) for name, (matrices, kind) in parts.items()}
    write_tensors(directory / "m.gguf", {f"blk.0.ffn_{name}_exps.weight": found for name, found in stored.items()})
    config = {"quantization_config": {"quant_method": "gguf", "files": [str(directory / "m.gguf")]}}
    (directory / "config.json").write_text(json.dumps(config))
    gate, up, down = (values_of(blocks, kind) for kind, blocks in stored.values())
    return ReferenceExperts(gate, up, down)


def opened(directory: Path, experts: ReferenceExperts, isa: str | None = None, **options: Any) -> ExpertLayer:
    num_experts, inner, hidden = experts.gate.shape
    store = ExpertStore.load(directory, {0: "blk.0"}, ExpertShape(num_experts, hidden, inner), isa=isa, **options)
    return store.layers[0]


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.double() - wanted).norm() / wanted.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q4_K_M"])
@pytest.mark.parametrize("share", [range(2), range(1, 3)])
def test_a_share_of_the_experts_has_the_bits_of_all(
    layer_of: Callable[[str], tuple[Path, ReferenceExperts]], kind: str, share: range
) -> None:
    directory, experts = layer_of(kind)
    whole, part = opened(directory, experts), opened(directory, experts, share=share)
    x = torch.randn(5, experts.gate.shape[2], generator=torch.Generator().manual_seed(2))
    for own, expert in enumerate(share):
        ids = torch.full((5, 1), expert)
        expected = whole.forward(x, ids, torch.ones(5, 1))
        assert torch.equal(part.forward(x, ids - expert + own, torch.ones(5, 1)), expected)


@pytest.fixture(scope="module")
def layer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, ReferenceExperts]]:
    """layer_of(name) -> the directory of a layer's file, and what it stands for: written once for all that read it."""

    @functools.cache
    def written(name: str) -> tuple[Path, ReferenceExperts]:
        directory = tmp_path_factory.mktemp("layer")
        return directory, write(directory, random_problem(3, 256, 512, 1, 1).experts, KINDS[name])

    return written


@functools.cache
def reference_of(values: ReferenceExperts, dtype: torch.dtype, tokens: int) -> tuple[Problem, Tensor, list[Tensor]]:
    """A call, and the layer's output and its gradients of x and the adapter: the same on every instruction set."""
    p = random_problem(3, 256, 512, tokens, 2, dtype=dtype, ranks=(4,))
    leaves = [t.double().requires_grad_() for t in tensors_of(p.adapters[0])]
    x, weights = p.x.double().requires_grad_(), p.weights.double()
    slots = [(leaves, p.adapters[0].scaling)]
    wanted = moe.routed_experts(values, x, p.ids, weights, slots=slots, token_slots=p.token_slots)
    grads = torch.autograd.grad(wanted, [x, *leaves], p.grad_out.double(), materialize_grads=True)
    return p, wanted.detach(), list(grads)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("name", KINDS)
def test_forward_and_backward_are_the_reference_on_the_files_weights(
    name: str, isa: str, layer_of: Callable[[str], tuple[Path, ReferenceExperts]]
) -> None:
    directory, values = layer_of(name)
    for dtype, tokens, nodes in ((torch.float32, 5, 1), (torch.bfloat16, 3, 2), (torch.bfloat16, 40, 1)):
        p, wanted, grads = reference_of(values, dtype, tokens)
        layer = opened(directory, values, isa, num_threads=2, num_nodes=nodes)
        assert layer.format == NAMES[name]
        limit = FLOAT32 if dtype == torch.float32 else BF16_ACTIVATIONS if name == "BF16" else INTEGER_ACTIVATIONS
        assert relative(layer.forward(p.x, p.ids, p.weights, **p.lora), wanted) <= limit
        found = layer.backward(p.grad_out, p.x, p.ids, p.weights, **p.lora)
        for got, grad in zip([found.x, *tensors_of(found.slots[0])], grads, strict=True):
            if grad.count_nonzero() == 0:  # no token has the adapter
                assert got.abs().max() == 0
            else:
                assert relative(got, grad) <= 3 * limit


@pytest.mark.parametrize("name", [name for name in KINDS if name != "BF16"])
def test_the_packed_weights_are_the_files_to_the_bit(name: str, tmp_path: Path) -> None:
    values = write(tmp_path, random_problem(2, 256, 256, 1, 1).experts, KINDS[name])
    layer = opened(tmp_path, values, num_nodes=2)
    for expert in range(2):
        wanted = (values.gate[expert], values.up[expert], values.down[expert])
        assert all(map(torch.equal, layer.unpacked(expert), wanted))


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("BF16", "Q8_0", "Q4_0")])
def test_a_tokens_bits_do_not_depend_on_batch_threads_or_memory_nodes(name: str, isa: str, tmp_path: Path) -> None:
    p = random_problem(2, 256, 256, 50, 2, dtype=torch.bfloat16)
    values = write(tmp_path, p.experts, KINDS[name])
    layer = opened(tmp_path, values, isa, num_threads=1)
    whole = layer.forward(p.x, p.ids, p.weights)
    for t in range(0, 50, 9):
        rows = slice(t, t + 1)
        assert torch.equal(layer.forward(p.x[rows], p.ids[rows], p.weights[rows])[0], whole[t])
    other = opened(tmp_path, values, isa, num_threads=3, num_nodes=4)
    assert torch.equal(other.forward(p.x, p.ids, p.weights), whole)


@pytest.mark.slow
def test_a_scale_that_is_no_number_is_refused_with_its_place(tmp_path: Path) -> None:
    experts = random_problem(2, 256, 256, 1, 1).experts
    for kind, at in (("Q8_0", 0), ("Q4_K", 2), ("Q6_K", 208), ("MXFP4", 0), ("IQ4_XS", 0)):
        write(tmp_path, experts, (kind, kind))
        gate, up, down = (blocks_of(part, kind) for part in (experts.gate, experts.up, experts.down))
        size = BLOCKS[kind][1]
        first = up.reshape(-1, size)
        first[5, at : at + 2] = 255 if kind == "MXFP4" else (0, 0x7E)  # NaN as e8m0, as float16
        named = {"gate": gate, "up": up, "down": down}
        write_tensors(tmp_path / "m.gguf", {f"blk.0.ffn_{n}_exps.weight": (kind, b) for n, b in named.items()})
        with pytest.raises(CheckpointError, match=rf"m.gguf: tensor 'blk.0.ffn_up_exps.weight'.* block 5 of {kind}"):
            opened(tmp_path, experts)


def test_what_a_layer_can_not_be_made_of_is_refused(tmp_path: Path) -> None:
    experts = random_problem(2, 256, 256, 1, 1).experts
    values = write(tmp_path, experts, ("BF16", "Q8_0"))
    with pytest.raises(CheckpointError, match=r"ffn_down_exps.weight' has type Q8_0, .*BF16; expected all"):
        opened(tmp_path, values)
    values = write(tmp_path, experts, ("Q8_0", "Q8_0"))
    with pytest.raises(InvalidValueError, match="served as the GGUF file has them"):
        ExpertStore.load(tmp_path, {0: "blk.0"}, ExpertShape(2, 256, 256), expert_format="int4")
    with pytest.raises(CheckpointError, match=r"shape \[2, 256, 256\], expected \[3, 256, 256\]"):
        ExpertStore.load(tmp_path, {0: "blk.0"}, ExpertShape(3, 256, 256))
    with pytest.raises(CheckpointError, match=r"blk.1"):
        ExpertStore.load(tmp_path, {0: "blk.1"}, ExpertShape(2, 256, 256))
