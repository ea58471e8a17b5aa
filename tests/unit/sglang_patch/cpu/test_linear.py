"""SGLang's own linear layers and head, patched: the bits of `kt_runtime.experts.dense`, whatever the batch is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from reference.drawn import drawn

from kt_runtime.experts import dense
from kt_runtime.ops.matmul import frozen_linear
from kt_runtime.resident.training.losses import log_softmax


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_linear_layer_gives_training_s_bits_for_any_batch(patched_sglang: None, with_bias: bool) -> None:
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    x, layer, bias = (
        drawn(21, 512, seed=0, dtype=torch.bfloat16),
        SimpleNamespace(weight=drawn(200, 512, seed=1, dtype=torch.bfloat16)),
        drawn(200, seed=2, dtype=torch.bfloat16),
    )
    added = bias if with_bias else None
    served = UnquantizedLinearMethod().apply(layer, x, added)
    trained = frozen_linear(x.view(3, 7, 512), layer.weight, added).flatten(0, 1)
    assert torch.equal(served, trained) and torch.equal(served, dense.linear(x, layer.weight, added))
    alone = torch.cat([UnquantizedLinearMethod().apply(layer, row, added) for row in x.split(1)])
    assert torch.equal(served, alone)


def test_the_head_gives_training_s_logits_for_any_batch(patched_sglang: None) -> None:
    from sglang.srt.layers.logits_processor import LogitsProcessor

    processor = SimpleNamespace(use_fp32_lm_head=False, rl_on_policy_target=None)
    hidden, head = (
        drawn(9, 256, seed=3, dtype=torch.bfloat16),
        SimpleNamespace(weight=drawn(700, 256, seed=4, dtype=torch.bfloat16)),
    )
    served = LogitsProcessor._compute_lm_head(processor, hidden, head)
    assert served.dtype == torch.bfloat16
    assert torch.equal(served.float(), log_softmax(hidden, head.weight)[0])
    alone = torch.cat([LogitsProcessor._compute_lm_head(processor, row, head) for row in hidden.split(1)])
    assert torch.equal(served, alone)


def test_a_head_in_float32_stays_sglang_s(patched_sglang: None) -> None:
    from sglang.srt.layers.logits_processor import LogitsProcessor

    processor = SimpleNamespace(use_fp32_lm_head=True, use_fp32_lm_head_output=False, rl_on_policy_target=None)
    hidden, head = (
        drawn(3, 64, seed=5, dtype=torch.bfloat16),
        SimpleNamespace(weight=drawn(50, 64, seed=6, dtype=torch.bfloat16)),
    )
    found = LogitsProcessor._compute_lm_head(processor, hidden, head)
    assert torch.equal(found, hidden.float() @ head.weight.float().T)
