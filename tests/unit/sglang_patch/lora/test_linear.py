"""SGLang's LoRA backend, patched: the bits of the twin's LoRA, whatever the batch is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from reference.drawn import drawn

from kt_runtime.experts import dense
from kt_runtime.ops.matmul import served_product
from kt_runtime.resident.twin.frozen import FrozenLinear
from kt_runtime.resident.twin.lora_linear import LoraLinear
from kt_runtime.sglang_patch.lora import linear

IN, PARTS, MAX_RANK = 40, (24, 8, 8), 8
RANKS, SCALINGS = [0, 3, 8], [0.0, 10 / 3, 0.25]  # of the pool's slots; slot 0 is the base
BATCH = [(1, 5), (0, 2), (2, 1), (1, 3)]  # (slot, tokens)


def pool(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A [slots, 3 R, K] and B [slots, N, R] of a fused layer; unused parts hold NaN."""
    a = torch.full((3, 3 * MAX_RANK, IN), torch.nan, dtype=dtype)
    b = torch.full((3, sum(PARTS), MAX_RANK), torch.nan, dtype=dtype)
    for slot, rank in enumerate(RANKS):
        a[slot, : 3 * rank] = drawn(3 * rank, IN, seed=slot, dtype=dtype)
        b[slot, :, :rank] = drawn(sum(PARTS), rank, seed=10 + slot, dtype=dtype)
    return a, b


def backend(batch: list[tuple[int, int]]) -> Any:
    from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend

    made = TorchNativeLoRABackend(max_loras_per_batch=3, device=torch.device("cpu"))
    made.batch_info = SimpleNamespace(
        use_cuda_graph=False,
        weight_indices_cpu=torch.tensor([slot for slot, _ in batch]),
        seg_lens_cpu=torch.tensor([tokens for _, tokens in batch]),
        lora_ranks_cpu=torch.tensor(RANKS),
        scalings_cpu=torch.tensor(SCALINGS),
    )
    return made


def served(x: torch.Tensor, base: torch.Tensor, batch: list[tuple[int, int]]) -> torch.Tensor:
    a, b = pool(x.dtype)
    offsets = torch.tensor([0, 24, 32, 40])
    result: torch.Tensor = backend(batch).run_qkv_lora(x, a, b, offsets, offsets, max(PARTS), base_output=base.clone())
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_token_gets_training_s_bits(patched_sglang: None, dtype: torch.dtype) -> None:
    tokens = [slot for slot, count in BATCH for _ in range(count)]
    x, base = drawn(len(tokens), IN, seed=20, dtype=dtype), drawn(len(tokens), sum(PARTS), seed=21, dtype=dtype)
    found = served(x, base, BATCH)
    a, b = pool(dtype)
    for token, slot in enumerate(tokens):
        row, rank = slice(token, token + 1), RANKS[slot]
        expected, start = base[row].clone(), 0
        for part, size in enumerate(PARTS if rank else ()):
            columns = slice(start, start + size)
            part_a, part_b = a[slot, part * rank : (part + 1) * rank].float(), b[slot, columns, :rank].float()
            low = served_product(x[row], part_a.T, alpha=float(torch.tensor(SCALINGS[slot])))
            expected[:, columns] = served_product(low, part_b.T, base=base[row, columns])
            start += size
        assert torch.equal(found[row], expected), (token, slot)
    alone = [served(x[i : i + 1], base[i : i + 1], [(slot, 1)]) for i, slot in enumerate(tokens)]
    assert torch.equal(torch.cat(alone), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_twin_s_layer_has_serving_s_bits(patched_sglang: None, dtype: torch.dtype) -> None:
    base = torch.nn.Linear(IN, 24, bias=False, dtype=dtype).requires_grad_(False)
    base.weight.copy_(drawn(24, IN, seed=30, dtype=dtype))
    base.__class__ = FrozenLinear
    twin = LoraLinear(base, "one", LoraConfig(r=3, lora_alpha=10), r=3, lora_alpha=10)  # type: ignore[arg-type]
    a, b = drawn(3, IN, seed=31, dtype=torch.float32), drawn(24, 3, seed=32, dtype=torch.float32)
    twin.lora_A["one"].weight, twin.lora_B["one"].weight = torch.nn.Parameter(a), torch.nn.Parameter(b)
    a_pool, b_pool = torch.full((3, MAX_RANK, IN), torch.nan, dtype=dtype), torch.zeros(3, 24, MAX_RANK, dtype=dtype)
    a_pool[1, :3], b_pool[1, :, :3] = a.to(dtype), b.to(dtype)
    x, served = drawn(7, IN, seed=33, dtype=dtype), backend([(1, 7)])
    low = served.run_lora_a_sgemm(x, a_pool)
    found = served.run_lora_b_sgemm(low, b_pool, torch.tensor([0, 24]), base_output=dense.linear(x, base.weight))
    assert torch.equal(found, twin.eval()(x))


def test_sums_are_those_of_the_merged_matrix(patched_sglang: None) -> None:
    x, base = drawn(5, IN, seed=22, dtype=torch.float32), drawn(5, sum(PARTS), seed=23, dtype=torch.float32)
    a, b = pool(torch.float32)
    expected = base.double()
    for part, columns in enumerate((slice(0, 24), slice(24, 32), slice(32, 40))):
        merged = b[1, columns, :3].double() @ a[1, part * 3 : (part + 1) * 3].double()
        expected[:, columns] += SCALINGS[1] * x.double() @ merged.T
    found = served(x, base, [(1, 5)]).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)  # 1.5e-5 measured, of 107


def test_a_batch_s_segments_are_made_once_and_again_for_other_tokens(patched_sglang: None) -> None:
    info = backend(BATCH).batch_info
    first = linear.segments(info)
    assert [(part.rows, part.slot, part.rank) for part in first] == [
        (slice(0, 5), 1, 3),
        (slice(7, 8), 2, 8),
        (slice(8, 11), 1, 3),
    ]
    assert linear.segments(info) is first
    info.weight_indices_cpu, info.seg_lens_cpu = torch.tensor([2]), torch.tensor([4])
    assert [(part.rows, part.scaling) for part in linear.segments(info)] == [(slice(0, 4), 0.25)]
