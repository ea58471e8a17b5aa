"""What of Llama 4's patch no engine on a CPU shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kt_runtime.errors import InvalidValueError
from kt_runtime.experts import dense
from kt_runtime.sglang_patch.models import llama4


def runner(prefill: str, decode: str, context: int, model_type: str = "llama4_text") -> Any:
    config = SimpleNamespace(context_len=context, hf_config=SimpleNamespace(model_type=model_type))
    return SimpleNamespace(
        attention_chunk_size=8192,
        model_config=config,
        prefill_attention_backend_str=prefill,
        decode_attention_backend_str=decode,
    )


def test_a_backend_without_chunks_is_refused_where_a_context_may_be_longer_than_one() -> None:
    for backends in (("triton", "triton"), ("fa3", "trtllm_mha")):
        with pytest.raises(InvalidValueError, match=rf"is '{backends[1]}'.* chunks of 8192 tokens.* has 8193.* fa3"):
            llama4.check_backend(None, runner(*backends, 8193))
        llama4.check_backend(None, runner(*backends, 8192))
        llama4.check_backend(None, runner(*backends, 8193, "qwen3_moe"))
    llama4.check_backend(None, runner("fa3", "fa3", 1 << 20))


def test_only_llama_4_rotates_adjacent_elements_by_it(patched_sglang: None) -> None:
    from sglang.srt.models import glm4_moe, qwen3_moe
    from sglang.srt.models import llama4 as of_sglang

    assert of_sglang.get_rope is llama4.adjacent_rope
    assert glm4_moe.get_rope is qwen3_moe.get_rope is not llama4.adjacent_rope


@pytest.mark.parametrize("isa", ["portable", None])
def test_the_largest_logit_is_chosen_where_all_sigmoids_are_one(isa: str | None) -> None:
    """In float32 the sigmoids of 17 and above are 1."""
    dense.configure(isa, 1)
    try:
        logits = torch.tensor([[18.0, 40.0, 30.0, -1.0], [-3.0, -2.0, -9.0, -2.0], [0.0, 0.0, 0.0, 0.0]])
        weights, ids = llama4.top_1(logits)
        assert ids.tolist() == [[1], [1], [0]]
        torch.testing.assert_close(weights, logits.gather(1, ids.long()).sigmoid(), rtol=6e-7, atol=0)  # 6e-8
    finally:
        dense.configure()
