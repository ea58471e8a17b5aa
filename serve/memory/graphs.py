"""Memory of the graphs that SGLang captures on a GPU: an estimate, what SGLang 0.5.23 itself leaves free for them.

SGLang's `reserve_for_graph_mb` (arg_groups/memory_hook.py) reserves 2 MiB for each request of the largest decode graph.
For prefills with grouped-query attention it reserves 8 MiB for each captured length, which is memory outside of
PyTorch's pools; with latent attention 1.5 GiB in all. A test compares. After its captures SGLang logs what they took.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MIB = 2**20
OF_DECODED_REQUEST = 2 * MIB
OF_PREFILL_LENGTH = 8 * MIB
OF_LATENT_PREFILLS = 1536 * MIB
# `generate_prefill_cuda_graph_batch_sizes`, up to the most tokens that kt-runtime asks for.
PREFILL_LENGTHS = (*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32))


def graph_bytes(config: Mapping[str, Any], decoded_requests: int, prefill_tokens: int) -> int:
    """`decoded_requests`: of the largest decode graph; `prefill_tokens`: of the longest prefill's; 0: none is captured.

    `config`: the model's config.json.
    """
    lengths = sum(length <= prefill_tokens for length in PREFILL_LENGTHS)
    prefills = OF_LATENT_PREFILLS if lengths and config.get("kv_lora_rank") else lengths * OF_PREFILL_LENGTH
    return decoded_requests * OF_DECODED_REQUEST + prefills
