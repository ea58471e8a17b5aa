"""Operators of the device give the CPU's numbers under every schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from device import backend
from torch import Tensor

Operator = Callable[[Tensor, Tensor], Tensor | Sequence[Tensor]]


def written(x: Tensor, put: Callable[[Tensor], object]) -> Tensor:
    copy = x.clone()
    put(copy)
    return copy


def into(x: Tensor) -> Tensor:
    out = torch.empty(0, device=x.device)
    torch.add(x, 1, out=out)
    return out


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def grouped_products(x: Tensor) -> Tensor:
    """Groups of 1, 0 and 3 rows of x."""
    weights = torch.linspace(-1, 1, 3 * 8 * 16, device=x.device).view(3, 8, 16)
    offsets = torch.tensor([1, 1, 4], dtype=torch.int32, device=x.device)
    return F.grouped_mm(F.pad(x, (0, 2)).bfloat16(), weights.bfloat16(), offs=offsets)


# x [4, 6] float32, ids [4] int64 below 4, on the device or on the CPU.
OPERATORS: dict[str, Operator] = {
    "arithmetic": lambda x, ids: (x @ x.t() + 1).relu() * 2 - x.sum(1),
    "number on the left": lambda x, ids: 1 / (2.0 + x.abs()),
    "types": lambda x, ids: x.bfloat16().float() + ids.unsqueeze(1) + ids.double().unsqueeze(1),
    "views": lambda x, ids: [
        x[1:, ::2],
        x.t().reshape(-1),
        x.view(2, 2, 6).transpose(0, 1),
        x.unfold(1, 2, 3),
        x[None],
    ],
    "a view of other bits": lambda x, ids: x.view(torch.int32),
    "written through a view": lambda x, ids: written(x, lambda t: t[1:3, 2:].mul_(3).t().add_(1)),
    "out": lambda x, ids: into(x),
    "lists": lambda x, ids: [*x.split([1, 3]), *x.unbind(1), torch.cat([x, x]), torch.stack([x, x], 1)],
    "foreach": lambda x, ids: torch._foreach_mul([x, x + 1], 2.0),
    "foreach in place": lambda x, ids: written(x, lambda t: torch._foreach_add_([t[0], t[1]], [t[2], t[3]], alpha=2)),
    "index": lambda x, ids: [x[ids], x[ids, ids], x[:, ids], x.index_select(0, ids), x.gather(0, ids[None])],
    "index on the CPU": lambda x, ids: x[torch.tensor([2, 0])],
    "index_put": lambda x, ids: written(x, lambda t: t.index_put_((ids,), x * 2, accumulate=True)),
    "index_add": lambda x, ids: x.index_add(0, ids, x),
    "scatter": lambda x, ids: [x.scatter_add(0, ids[None].expand(4, 4), x), x.scatter(0, ids[None], 5.0)],
    "mask": lambda x, ids: [
        x[x > 0],
        x.masked_fill(x > 0, 2),
        written(x, lambda t: t.__setitem__(t > 0, x[x > 0] * 2)),
    ],
    "sizes from values": lambda x, ids: [
        *x.nonzero(as_tuple=True),
        ids.unique(),
        ids.bincount(),
        ids.repeat_interleave(ids),
        x.masked_select(x < 0),
        F.one_hot(ids),
    ],
    "reductions": lambda x, ids: [*x.max(1), x.mean(), x.std(0), x.argmax(), x.cumsum(1), x.logsumexp(1), x.norm()],
    "order": lambda x, ids: [*x.sort(), *x.topk(2), ids.argsort(stable=True)],
    "softmax": lambda x, ids: [x.softmax(-1), x.log_softmax(-1), F.cross_entropy(x, ids)],
    "norms": lambda x, ids: [F.rms_norm(x, (6,)), F.layer_norm(x, (6,))],
    "where": lambda x, ids: torch.where(x > 0, x, 0.5),
    "complex": lambda x, ids: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2).contiguous()) * 2j),
    "attention": lambda x, ids: attention(x.view(1, 2, 4, 3)),
    "convolution": lambda x, ids: F.conv2d(x.view(1, 1, 4, 6), torch.ones(2, 1, 3, 3, device=x.device)),
    "embedding": lambda x, ids: F.embedding(ids, x),
    "grouped products": lambda x, ids: grouped_products(x),
}

# The device computes these as several operators, the CPU as one. Largest relative difference: 3.5e-7, one bf16 step.
ROUNDED = {"norms": 2e-6, "attention": 2e-6, "grouped products": 2**-8}


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(4, 6, generator=generator), torch.tensor([2, 0, 1, 2])


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("schedule", ["late", "eager", "random"])
def test_an_operator_gives_the_cpus_bits(late_device: torch.device, name: str, schedule: str) -> None:
    backend.set_schedule(schedule, seed=5)
    x, ids = inputs()
    wanted, got = (OPERATORS[name](x.to(d), ids.to(d)) for d in (torch.device("cpu"), late_device))
    pairs = [(wanted, got)] if isinstance(wanted, Tensor) else zip(wanted, got, strict=True)
    for w, g in pairs:
        assert isinstance(g, Tensor) and isinstance(w, Tensor)
        assert (g.device, g.dtype, g.shape) == (late_device, w.dtype, w.shape)
        assert name in ROUNDED or torch.equal(g.cpu(), w)
        torch.testing.assert_close(g.cpu(), w, rtol=ROUNDED.get(name, 0), atol=0)


def test_operators_need_no_wait_where_a_kernel_needs_none(late_device: torch.device) -> None:
    x, ids = (t.to(late_device) for t in inputs())
    without_waits = OPERATORS.keys() - {
        "mask",
        "sizes from values",
        "convolution",
        "grouped products",
        "index on the CPU",
    }
    with backend.no_hidden_waits():
        for name in without_waits:
            OPERATORS[name](x, ids)
        offsets = torch.full((3,), 4, dtype=torch.int32, device=late_device)
        F.grouped_mm(x.bfloat16().repeat(1, 4), torch.ones(3, 24, 8, device=late_device).bfloat16(), offs=offsets)


def two_layers(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    hidden = F.silu(F.linear(x, first))
    return F.linear(hidden * hidden.sigmoid(), second).pow(2).mean()


def test_gradients_and_optimizer_steps_give_the_cpus_numbers(scheduled_device: torch.device) -> None:
    def trained(device: torch.device) -> list[Tensor]:
        x = inputs()[0].to(device)
        weights = [torch.linspace(-1, 1, 30).view(5, 6).to(device), torch.linspace(-1, 1, 15).view(3, 5).to(device)]
        weights = [w.requires_grad_() for w in weights]
        optimizer = torch.optim.AdamW(weights, lr=0.1, foreach=True)
        for _ in range(3):
            two_layers(x, *weights).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [w.detach().cpu() for w in weights]

    for got, wanted in zip(trained(scheduled_device), trained(torch.device("cpu")), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-6, atol=0)


def test_gradients_of_a_convolution_give_the_cpus_bits(late_device: torch.device) -> None:
    def gradients(device: torch.device) -> list[Tensor]:
        x = inputs()[0].view(1, 1, 4, 6).to(device).requires_grad_()
        weight, bias = torch.ones(2, 1, 3, 3, device=device), torch.ones(2, device=device)
        F.conv2d(x, weight.requires_grad_(), bias.requires_grad_(), padding=1).pow(2).sum().backward()
        return [t.grad.cpu() for t in (x, weight, bias) if t.grad is not None]

    got, wanted = gradients(late_device), gradients(torch.device("cpu"))
    assert len(got) == 3 and all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))


def test_backward_runs_on_the_streams_of_forward(scheduled_device: torch.device) -> None:
    x = inputs()[0].to(scheduled_device).requires_grad_()
    stream = torch.Stream(device=scheduled_device)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        inner = x * 3
    torch.accelerator.current_stream().wait_stream(stream)
    (inner * inner).sum().backward()
    assert x.grad is not None and torch.equal(x.grad.cpu(), inputs()[0] * 3 * 2 * 3)


def test_tensors_of_two_devices_are_refused(late_device: torch.device) -> None:
    x, ids = inputs()
    with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device, but found .*late:0"):
        torch.mul(x.to(late_device), x)
    with pytest.raises(RuntimeError, match="must match the size"):
        x.to(late_device) + ids.to(late_device)[:3, None]


def random_numbers(device: torch.device) -> list[list[float]]:
    drawn = [torch.randn(3, device=device), torch.rand(3, device=device), F.dropout(torch.ones(9, device=device), 0.5)]
    return [
        t.tolist() for t in [*drawn, torch.randperm(9, device=device), torch.ones(5, device=device).bernoulli_(0.5)]
    ]


def test_random_numbers_follow_the_seed_and_not_the_schedule(scheduled_device: torch.device) -> None:
    torch.manual_seed(4)
    drawn = random_numbers(scheduled_device)
    backend.set_schedule("eager")
    torch.manual_seed(4)
    assert random_numbers(scheduled_device) == drawn != random_numbers(scheduled_device)


def test_the_state_of_random_numbers_is_saved_and_restored(late_device: torch.device) -> None:
    module = torch.get_device_module(late_device)
    state, host = module.get_rng_state(), torch.get_rng_state()
    drawn = random_numbers(late_device)
    with torch.random.fork_rng(devices=[0], device_type="late"):
        random_numbers(late_device)
    assert torch.equal(torch.get_rng_state(), host), "the device's numbers came from the host's generator"
    module.set_rng_state(state)
    assert random_numbers(late_device) == drawn
    generators = [torch.Generator(device=late_device).manual_seed(1) for _ in range(2)]
    first, second = (torch.rand(4, generator=generator, device=late_device) for generator in generators)
    assert torch.equal(first, second)


# The sizes of a result are asked for once for each signature of a call (late/sizes.h).
CALLS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.sum(0),
    lambda x: x.sum(1),
    lambda x: x.sum(0, keepdim=True),
    lambda x: x.sum(0, dtype=torch.float64),
    lambda x: x[:2].sum(0),
    lambda x: x * 2,
    lambda x: x.double() * 2,
    lambda x: x.t() * 2,
    lambda x: (x > 0) * 2,
    lambda x: (x > 0) * 2.0,
    lambda x: torch.cat([x, x]),
    lambda x: torch.cat([x, x[:1]]),
    lambda x: torch.cat([x, x], 1),
    lambda x: torch.where(x > 0, x, torch.tensor(1.0, dtype=torch.float64)),
    lambda x: torch.where(x > 0, x, x.double()),
    lambda x: x[torch.tensor([0, 1])],
    lambda x: x[torch.tensor([0, 1]), torch.tensor([1, 2])],
    lambda x: x[:, torch.tensor([1])],
]


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_sizes_are_those_of_a_call_s_own_arguments(late_device: torch.device, default: torch.dtype) -> None:
    before, given = torch.get_default_dtype(), torch.linspace(-1, 1, 12).view(3, 4)
    torch.set_default_dtype(default)
    try:
        for _ in range(2):
            for call in [*CALLS, lambda x: (x > 0) / 2]:
                found, wanted = call(given.to(late_device)), call(given)
                assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
                assert torch.equal(found.cpu(), wanted)
    finally:
        torch.set_default_dtype(before)
