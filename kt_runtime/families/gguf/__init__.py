"""A GGUF file of llama.cpp as a checkpoint: the Hugging Face config of its keys (`keys`), how it holds the tensors of a
Hugging Face checkpoint (`layout`), and the types of its matrices (`types`)."""

from kt_runtime.families.gguf.keys import ARCHITECTURES, config_of, read_for_config
from kt_runtime.families.gguf.layout import (
    Held,
    Part,
    Values,
    alternatives,
    expert_prefix,
    expert_tensors,
    held,
    layer_of,
    ways_of_linear,
)
from kt_runtime.families.gguf.types import (
    DENSE_TYPES,
    EXPERT_TYPES,
    expert_types,
    packed_bytes,
    packed_name,
    packed_tensors,
)

__all__ = [
    "ARCHITECTURES",
    "DENSE_TYPES",
    "EXPERT_TYPES",
    "Held",
    "Part",
    "Values",
    "alternatives",
    "config_of",
    "expert_prefix",
    "expert_tensors",
    "expert_types",
    "held",
    "layer_of",
    "packed_bytes",
    "packed_name",
    "packed_tensors",
    "read_for_config",
    "ways_of_linear",
]
