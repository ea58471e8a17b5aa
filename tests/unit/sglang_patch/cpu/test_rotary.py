"""SGLang's rotary embedding, which is not patched: the twin reads its table and gets its bits."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kt_runtime.families import family_for
from kt_runtime.ops.rotary import Rotary
from kt_runtime.sglang_patch.cache.namespace import named_tensors

TOKENS, HEADS = 90, 4


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
        trained = Rotary(table.to(x.dtype), places[None], family.rotates_adjacent(served.config))(x[None])[0]
        assert torch.equal(rotated.view(x.shape), trained)
