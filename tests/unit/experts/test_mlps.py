"""What experts compute beside products: activations and biases, against float64, autograd and transformers' modules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import moe
from reference.expert_problems import Problem, assert_close, build_layer, present, random_problem
from reference.instruction_sets import instruction_sets
from safetensors.torch import save_file
from torch import Tensor, nn

from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.experts import ExpertShape, ExpertStore, LoraSlot, routed_experts
from kt_runtime.experts.gpu.paths import DevicePaths
from kt_runtime.families.stack import ACTIVATIONS, ExpertMlp, activation_of

# Limits at which many elements are clamped.
MLPS = {
    name: ExpertMlp(
        name,
        limit=0.8 if name in ("silu_clamped", "swigluoai") else None,
        alpha=1.702 if name == "swigluoai" else None,
        has_bias=has_bias,
    )
    for name, has_bias in zip(ACTIVATIONS, (True, False, True, False, True, True), strict=True)
}


def of_mlp(p: Problem, mlp: ExpertMlp) -> Problem:
    """The problem with these experts, and adapters without a gate where they have none."""
    num_experts, inner, hidden = p.experts.gate.shape
    generator = torch.Generator().manual_seed(99)
    biases = [torch.randn(num_experts, n, generator=generator) for n in (inner, inner, hidden)]
    p.experts = replace(p.experts, biases=(biases[0], biases[1], biases[2]) if mlp.has_bias else None, mlp=mlp)
    if not mlp.has_gate:
        p.slots = [s and replace(s, gate_a=None, gate_b=None) for s in p.slots]
    return p


def there(slot: LoraSlot | None) -> list[Tensor]:
    return [t for t in present(slot).tensors() if t is not None]


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("name", MLPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward_are_those_of_the_reference(isa: str, name: str, dtype: torch.dtype) -> None:
    mlp = MLPS[name]
    if dtype == torch.bfloat16 and mlp.limit is not None:
        mlp = replace(mlp, limit=100.0)  # roundings move elements over a border, where gradients jump
    p = of_mlp(random_problem(4, 70, 45, 14, 3, dtype=dtype, ranks=(4, 8)), mlp)
    x, weights = p.x.double().requires_grad_(), p.weights.double().requires_grad_()
    leaves = [[t.double().requires_grad_() for t in there(slot)] for slot in p.adapters]
    gate = [] if mlp.has_gate else [None, None]
    slots = [((*gate, *of_slot), slot.scaling) for of_slot, slot in zip(leaves, p.adapters, strict=True)]
    out = moe.routed_experts(p.experts, x, p.ids, weights, slots=slots, token_slots=p.token_slots)
    wanted = torch.autograd.grad(out, [x, weights, *(t for each in leaves for t in each)], p.grad_out.double())

    layer = build_layer(p.experts, isa)
    found, retained = layer.forward_retaining(p.x, p.ids, p.weights, **p.lora)
    assert_close(found, out.detach(), isa)
    calls = [layer.backward(p.grad_out, p.x, p.ids, p.weights, **p.lora, retained=kept) for kept in (retained, None)]
    of_call = [[g.x, g.weights, *(t for slot in g.slots for t in there(slot))] for g in calls]
    for kept, again, w in zip(*of_call, wanted, strict=True):
        assert torch.equal(kept, again)
        # Of bfloat16 some kernels round the factors of their products, also where the result is float32.
        assert_close(kept.to(dtype), w, f"{name} {isa}")


@pytest.mark.parametrize("name", MLPS)
def test_dropout_of_adapters_is_the_same_forward_and_backward(name: str) -> None:
    """The loss is linear in B: its slope along a gradient is the gradient's square, whatever the mask is."""
    p = of_mlp(random_problem(3, 40, 32, 12, 2, ranks=(4,)), MLPS[name])
    slot, layer = replace(p.adapters[0], dropout=0.4, seed=7), build_layer(p.experts)
    tokens = torch.zeros(12, dtype=torch.int32)

    def out(down_b: Tensor) -> Tensor:
        return layer.forward(p.x, p.ids, p.weights, slots=[replace(slot, down_b=down_b)], token_slots=tokens).double()

    grads = layer.backward(p.grad_out, p.x, p.ids, p.weights, slots=[slot], token_slots=tokens)
    direction = present(present(grads.slots[0]).down_b)
    down_b = present(slot.down_b)
    slope = ((out(down_b + direction) - out(down_b - direction)) * p.grad_out.double()).sum() / 2
    assert float(slope) == pytest.approx(float(direction.double().square().sum()), rel=2.5e-7)  # 2.5e-8


def test_autograd_at_the_borders_of_clamps_is_that_of_pytorch() -> None:
    """One weight that is 1, so that gate and up are x itself: at, inside and outside the limit."""
    limit = 0.75
    one = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    x = torch.tensor([[limit], [-limit], [limit + 0.25], [-limit - 0.25], [0.5]])
    ids, weights = torch.zeros(5, 1, dtype=torch.int32), torch.ones(5, 1)
    for name in ("silu_clamped", "swigluoai"):
        experts = moe.ReferenceExperts(one, one, one, mlp=replace(MLPS[name], limit=limit, has_bias=False))
        exact = x.double().requires_grad_()
        moe.routed_experts(experts, exact, ids, weights).sum().backward()
        found = x.clone().requires_grad_()
        routed_experts(build_layer(experts), found, ids, weights, None).sum().backward()
        torch.testing.assert_close(present(found.grad).double(), present(exact.grad), rtol=0, atol=5e-8)  # 5e-9
        assert present(found.grad)[2] == 0  # beyond both limits


def test_a_bias_of_down_is_multiplied_by_the_routing_weight_and_enters_its_gradient() -> None:
    p = of_mlp(random_problem(3, 24, 16, 5, 2), ExpertMlp(has_bias=True))
    zero = torch.zeros_like(p.experts.gate), torch.zeros_like(p.experts.up), torch.zeros_like(p.experts.down)
    p.experts = replace(p.experts, gate=zero[0], up=zero[1], down=zero[2])
    layer, bias = build_layer(p.experts), present(p.experts.biases)[2]
    routed = (p.ids >= 0).float() * p.weights
    wanted = (routed[..., None] * bias[p.ids.clamp(min=0).long()]).sum(1)
    assert torch.equal(layer.forward(p.x, p.ids, p.weights), wanted)
    by_weights = layer.backward(p.grad_out, p.x, p.ids, p.weights).weights
    exact = (bias[p.ids.clamp(min=0).long()] * p.grad_out[:, None]).sum(2) * (p.ids >= 0)
    torch.testing.assert_close(by_weights, exact, rtol=0, atol=1.2e-6)  # 1.2e-7 measured


def transformers_experts(model: str) -> tuple[nn.Module, ExpertMlp]:
    """transformers' module of 4 experts, hidden and intermediate size 32, and how a family's table describes it."""
    if model == "gpt_oss":
        from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

        made = gpt_oss.GptOssConfig(hidden_size=32, intermediate_size=32, num_local_experts=4, swiglu_limit=0.7)
        oai = ExpertMlp("swigluoai", 0.7, 1.702, has_bias=True, is_interleaved=True, is_transposed=True)
        return gpt_oss.GptOssExperts(made), oai
    if model == "deepseek_v4":
        from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

        config = v4.DeepseekV4Config(hidden_size=32, moe_intermediate_size=32, n_routed_experts=4, swiglu_limit=0.7)
        config.num_local_experts, config.intermediate_size = 4, 32
        return v4.DeepseekV4Experts(config), activation_of({"hidden_act": "silu", "swiglu_limit": 0.7})
    from transformers.models.nemotron_h import modeling_nemotron_h as nemotron

    of_nemotron = nemotron.NemotronHConfig(hidden_size=32, moe_intermediate_size=32, n_routed_experts=4)
    return nemotron.NemotronHExperts(of_nemotron), activation_of({"mlp_hidden_act": "relu2"}, "mlp_hidden_act")


@pytest.mark.parametrize("model", ["gpt_oss", "deepseek_v4", "nemotron_h"])
def test_experts_that_transformers_writes_compute_what_its_module_does(model: str, tmp_path: Path) -> None:
    module, mlp = transformers_experts(model)
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        parameter.data = (0.4 * torch.randn(parameter.shape, generator=generator)).bfloat16().float()
    save_file({f"m.{name}": t for name, t in module.state_dict().items()}, tmp_path / "model.safetensors")
    layer = ExpertStore.load(tmp_path, {0: "m"}, ExpertShape(4, 32, 32), num_threads=1, mlp=mlp).layers[0]
    x = torch.randn(9, 32, generator=generator)
    ids, weights = torch.randint(0, 4, (9, 2), generator=generator), torch.rand(9, 2, generator=generator)
    # One expert twice for a token: transformers' loops count it once where they use index_add of positions.
    ids[:, 1] = (ids[:, 0] + 1) % 4
    theirs, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    module.requires_grad_(False)
    wanted = module(theirs, ids, weights)
    found = routed_experts(layer, ours, ids, weights, None)
    assert_close(found, wanted.double(), model)  # up to 1.9e-7 measured
    upstream = torch.randn(9, 32, generator=generator)
    for out in (wanted, found):
        (out * upstream).sum().backward()
    assert_close(present(ours.grad), present(theirs.grad).double(), model)  # 2.6e-7 measured


def test_the_fingerprint_covers_activation_and_biases() -> None:
    p = random_problem(2, 32, 16, 3, 1)
    mlps = [ExpertMlp(), ExpertMlp("gelu"), ExpertMlp("silu_clamped", 1.0), ExpertMlp("silu_clamped", 2.0)]
    assert len({fingerprint(replace(p.experts, mlp=mlp)) for mlp in mlps}) == len(mlps)
    biased = of_mlp(p, ExpertMlp(has_bias=True)).experts
    gate, up, down = present(biased.biases)
    others = (gate, up, down + 1)
    assert (
        fingerprint(biased)
        != fingerprint(replace(biased, biases=others))
        != fingerprint(replace(biased, biases=None, mlp=ExpertMlp()))
    )


def fingerprint(experts: moe.ReferenceExperts) -> str:
    shape = ExpertShape(*experts.down.shape)
    return ExpertStore({0: build_layer(experts)}, shape, "portable", 1).fingerprint()


def test_an_adapter_of_a_gate_that_is_not_there_is_refused() -> None:
    p = random_problem(3, 24, 16, 5, 2, ranks=(4,))
    layer = build_layer(replace(p.experts, mlp=ExpertMlp("relu2")))
    with pytest.raises(InvalidValueError, match=r"slots\[0\] adapts gate, but the experts of this layer have no gate"):
        layer.forward(p.x, p.ids, p.weights, **p.lora)


def test_experts_other_than_plain_swiglu_are_not_computed_by_a_device() -> None:
    layer = build_layer(replace(random_problem(2, 16, 16, 1, 1).experts, mlp=ExpertMlp("gelu")))
    with pytest.raises(InvalidValueError, match="activation 'gelu' are computed by the CPU only"):
        layer.device_paths = DevicePaths()


def test_an_unknown_activation_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown activation of experts 'swigluoia'.*swigluoai"):
        ExpertStore.load(tmp_path, {}, ExpertShape(1, 16, 16), mlp=ExpertMlp("swigluoia"))
    with pytest.raises(
        UnknownNameError, match=r"config.json: 'hidden_act': unknown activation.*'mish'.*gelu.*relu2.*silu"
    ):
        activation_of({"hidden_act": "mish"})


@pytest.mark.parametrize(
    ("mlp", "said"),
    [
        (ExpertMlp("silu_clamped"), "activation 'silu_clamped': limit is 0.0.*above 0"),
        (ExpertMlp("silu_clamped", -1.0), "limit is -1.0"),
        (ExpertMlp("swigluoai", 7.0), "activation 'swigluoai': alpha is 0.0"),
        (ExpertMlp("gelu", 7.0), "activation 'gelu': limit is 7.0.*expected none"),
    ],
)
def test_numbers_that_an_activation_does_not_have_are_refused(mlp: ExpertMlp, said: str) -> None:
    with pytest.raises(InvalidValueError, match=said):
        build_layer(replace(random_problem(1, 16, 16, 1, 1).experts, mlp=mlp))


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, ExpertMlp()),
        ({"hidden_act": "silu"}, ExpertMlp()),
        ({"hidden_act": "silu", "swiglu_limit": 10}, ExpertMlp("silu_clamped", 10.0)),
        ({"hidden_act": "swigluoai"}, ExpertMlp("swigluoai", 7.0, 1.702)),
        ({"hidden_act": "gelu_pytorch_tanh"}, ExpertMlp("gelu_pytorch_tanh")),
    ],
)
def test_the_activation_of_a_config(config: dict[str, Any], wanted: ExpertMlp) -> None:
    assert activation_of(config) == wanted


def test_a_limit_that_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"'swiglu_limit' is '7'; expected a number above 0"):
        activation_of({"swiglu_limit": "7"})
