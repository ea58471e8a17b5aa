from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kt_runtime.bench.experts.checkpoint import PREFIX, write_checkpoint
from kt_runtime.bench.experts.formats import FORMATS
from kt_runtime.bench.experts.layer_case import LayerCase
from kt_runtime.experts import ExpertShape, ExpertStore

# Largest relative error of a weight matrix (Frobenius) that rounding to the format explains.
TOLERANCES = {"bf16": 0.0, "fp8": 0.03, "int8": 0.012}
TOLERANCES |= {"int4": 0.12, "int4_g32": 0.12, "int4_g128": 0.15, "int4_g128_zp": 0.15, "int8_g128": 0.012}


@pytest.mark.parametrize("name", FORMATS)
def test_the_store_reads_what_was_written(case: LayerCase, name: str, tmp_path: Path) -> None:
    form, shape = FORMATS[name], case.shape
    write_checkpoint(tmp_path, form.encoding, case.weights)
    sizes = ExpertShape(shape.num_experts, shape.hidden, shape.intermediate)
    store = ExpertStore.load(tmp_path, {0: PREFIX}, sizes, expert_format=form.quantize, num_threads=2)
    for expert in (0, shape.num_experts - 1):
        for got, wanted in zip(store.layers[0].unpacked(expert), case.weights.expert(expert).values(), strict=True):
            error = (got.double() - wanted.double()).norm() / wanted.double().norm()
            assert error <= TOLERANCES[name], f"{name}: {error:.4f}"


def test_weights_are_normal_and_differ_from_expert_to_expert(case: LayerCase) -> None:
    assert abs(float(case.weights.gate_up.float().std()) - 0.02) < 0.0003
    assert abs(float(case.weights.down.float().mean())) < 0.0002
    assert not torch.equal(case.weights.down[0], case.weights.down[1])
