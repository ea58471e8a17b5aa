"""DeepSeek-V3.2 and GLM-5 in SGLang's own scheduler: prompts far longer than `index_topk`, in chunks of all sizes, in
batches and after cached prefixes; what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from reference.checkpoints.transformers_checkpoint import save
from reference.families import PRESETS
from reference.resident.native_step import prompt
from reference.resident.scheduler import Engine, engine

from kt_runtime.errors import InvalidValueError
from kt_runtime.families import family_for
from kt_runtime.serve.memory.plan import cached_numbers_per_token
from kt_runtime.sglang_patch.models.sparse_options import refuse_options

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
LENGTHS = (700, 350, 90)
CHUNKS = (64, 192, 1024)


def answers(served: Engine, *lengths: int) -> dict[int, tuple[list[int], list[float]]]:
    """Greedy tokens and all log-probabilities of prompts that are sent at once, without what is cached."""
    served.clear()
    rids = {f"r{length}": length for length in lengths}
    served.run(
        *(served.request(rid, prompt(length, length % 150), logprob_start_len=0) for rid, length in rids.items())
    )
    return {
        length: (served.tokens[rid], served.prompt_logprobs[rid] + served.logprobs[rid]) for rid, length in rids.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_chunks_batches_or_cached_prefixes(
    family: str, patched_sglang: None, tmp_path: Path
) -> None:
    import torch

    save(PRESETS[family], tmp_path / "model", torch.float32, fused=True, seed=5)
    found = []
    for chunk in CHUNKS:
        with engine(tmp_path / "model", "--dtype", "float32", "--chunked-prefill-size", str(chunk)) as served:
            together = answers(served, *LENGTHS)
            for length in LENGTHS:
                assert answers(served, length)[length] == together[length]
            served.clear()
            long = prompt(LENGTHS[0], LENGTHS[0] % 150)
            served.run(served.request("whole", long))
            # A branch of what is cached, and the prompt again: both begin with a prefix hit.
            branch = [*long[:512], *prompt(100, 9)]
            served.run(served.request("again", long), served.request("branch", branch))
            assert served.tokens["again"] == served.tokens["whole"] == together[LENGTHS[0]][0]
            hit = served.tokens["branch"], served.logprobs["branch"]
            served.clear()
            served.run(served.request("branch", branch))
            assert (served.tokens["branch"], served.logprobs["branch"]) == hit
            found.append(together)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_memory_plan_counts_index_keys(family: str) -> None:
    config = PRESETS[family].config
    numbers = config["kv_lora_rank"] + config["qk_rope_head_dim"] + config["index_head_dim"]
    assert cached_numbers_per_token(config) == config["num_hidden_layers"] * numbers


@pytest.mark.parametrize(
    ("passed_on", "on_cpu", "message"),
    [
        ([], False, "--device: the queries of deepseek_v32 .* give --device cpu"),
        (["--kv-cache-dtype", "fp8_e4m3"], True, "--kv-cache-dtype fp8_e4m3: .* the model's dtype"),
        (["--kv-cache-dtype=fp8_e5m2"], True, "--kv-cache-dtype fp8_e5m2"),
    ],
)
def test_what_an_indexer_can_t_be_served_with_is_refused_by_name(
    passed_on: list[str], on_cpu: bool, message: str
) -> None:
    options: Any = SimpleNamespace(passed_on=passed_on)
    family = family_for(PRESETS["deepseek_v32"].config)
    with pytest.raises(InvalidValueError, match=message):
        refuse_options(options, family, on_cpu)
    refuse_options(options, family_for(PRESETS["deepseek_v3"].config), on_cpu)
    refuse_options(SimpleNamespace(passed_on=["--kv-cache-dtype", "bfloat16"]), family, True)
