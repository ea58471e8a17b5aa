"""SGLang's rotary embedding, which is not patched: the twin reads its table and gets its bits."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import apply_rotary_pos_emb

from kt_runtime.families import family_for
from kt_runtime.resident.twin import attention
from kt_runtime.resident.twin.model import rotary_tables
from kt_runtime.sglang_patch.cache.namespace import named_tensors

TOKENS, HEADS = 90, 4


def trained(x: torch.Tensor, angles: torch.Tensor, family: str) -> torch.Tensor:
    """x [T, heads, R] as the twin rotates it."""
    tables = rotary_tables(angles[None], family, x.dtype)
    if family == "qwen3_moe":
        assert isinstance(tables, tuple)
        heads_first = x.transpose(0, 1)[None]
        rotated: torch.Tensor = apply_rotary_pos_emb(heads_first, heads_first, *tables)[0]
        return rotated[0].transpose(0, 1)
    return attention._rotated(x[None], *attention._tables(tables, x.dtype))[0]


@torch.no_grad()
def test_queries_and_keys_have_training_s_bits(served: SimpleNamespace) -> None:
    family = family_for(served.config)
    rotary = served.model.model.layers[0].self_attn.rotary_emb
    table = named_tensors(served.model)[family.rotary_table]
    assert table.data_ptr() == rotary.cos_sin_cache.data_ptr()
    g = torch.Generator().manual_seed(0)
    places = torch.randperm(len(table), generator=g)[:TOKENS]
    query, key = (torch.randn(len(places), heads, rotary.rotary_dim, generator=g) for heads in (HEADS, 1))
    found = rotary(places, query.clone(), key.clone())
    for x, rotated in zip((query, key), found, strict=True):
        assert torch.equal(rotated.view(x.shape), trained(x, table[places], family.name))
