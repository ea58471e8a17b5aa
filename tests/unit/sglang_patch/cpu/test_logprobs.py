"""Log-probabilities that SGLang returns, patched: `torch.log_softmax`, which computes each row alone."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from reference.drawn import drawn


def test_a_row_of_log_softmax_does_not_depend_on_the_others() -> None:
    logits = 4 * drawn(70, 5003, seed=0)
    whole = torch.log_softmax(logits, dim=-1)
    for rows in (1, 3, 33):
        assert torch.equal(torch.cat([torch.log_softmax(part, dim=-1) for part in logits.split(rows)]), whole)
    strided = torch.cat([logits, logits[:, :61]], dim=1)[:, :5003]
    assert torch.equal(torch.log_softmax(strided, dim=-1), whole)


def test_prompt_tokens_get_log_softmax(patched_sglang: None) -> None:
    from sglang.srt.layers.logprob_processor import InputLogprobProcessor

    assert InputLogprobProcessor(700).enable_fast_input_logprobs is False


def test_sampled_tokens_get_log_softmax_of_the_logits_by_their_temperature(served: SimpleNamespace) -> None:
    from sglang.srt.layers.sampler import Sampler

    logits = 4 * drawn(6, 700, seed=1)
    temperatures = torch.tensor([1.0, 1.0, 0.7, 1.3, 1.0, 1.0])[:, None]
    info = SimpleNamespace(
        has_custom_logit_processor=False,
        is_all_greedy=False,
        temperatures=temperatures,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        sampling_mask_batch_indices=None,
        sampling_support_logprobs_capture_indices=None,
        sampling_seed=None,
        grammars=None,
    )
    found = SimpleNamespace(next_token_logits=logits.clone())
    tokens = Sampler()(found, info, True, [0] * 6, [None] * 6, torch.zeros(6, dtype=torch.int64))
    expected = torch.log_softmax(logits / temperatures, dim=-1)[torch.arange(6), tokens]
    assert torch.equal(found.next_token_logprobs, expected)
