"""The table that describes a model family, and the parts that all families share.

From the Hugging Face config alone, a family describes three things that must agree: the twin's parameters
(transformers 5.19), SGLang 0.5.23's parameters that hold the same bytes, and the linear modules that LoRA may adapt. A
family is mostly a list of `FusedLinear`: one SGLang parameter, and the Hugging Face modules whose rows it consists of,
in order. Both name lists are derived from this list, so that they can't drift apart.

Not described here: routed experts' bytes (the expert store owns them), the rotary tables (computed, not loaded).
SGLang's dense weights are plain `[out, in]` matrices, even if the checkpoint has them quantized (`quantization.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, Literal, TypeVar

import msgspec

from kt_runtime.errors import InvalidValueError
from kt_runtime.families import naming
from kt_runtime.families.naming import Renaming
from kt_runtime.families.stack import DecoderStack, ExpertMlp
from kt_runtime.families.traits import Traits

ATTENTION: Final = "attention"
MLP: Final = "mlp"
SHARED: Final = "shared"
EXPERTS: Final = "experts"
GROUPS: Final = (ATTENTION, MLP, SHARED, EXPERTS)

Config = Mapping[str, Any]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One tensor of the twin: it aliases rows `start` to `stop` of SGLang's `source`.

    `name`: Hugging Face. `shape`: as in the twin's module. `is_buffer`: a buffer in the twin, while SGLang may hold a
    parameter; a buffer keeps SGLang's dtype (float32 for the router's correction bias) whatever the model's dtype.
    `source` may have more rows than `stop`: SGLang pads the vocabulary to a multiple of 64.
    """

    name: str
    source: str
    start: int
    stop: int
    shape: tuple[int, ...]
    is_buffer: bool = False


@dataclass(frozen=True, slots=True)
class LoraModule:
    """A linear module that LoRA may adapt: `y = W x`, W of shape [out_features, in_features].

    Routed experts are one entry per layer and projection, `model.layers.L.mlp.experts.gate_proj`, with `num_experts`
    matrices; elsewhere `num_experts` is 0. `source` is the SGLang module that computes it, and `start` to `stop` its
    rows there. Modules with the same `source` are one fused group: SGLang needs LoRA tensors for every member of it.
    For routed experts `source` is SGLang's parameter without `_weight`, `...experts.w13` or `...experts.w2`.
    `is_whole`: every rank has all of its rows. `pieces`: rows of parts each of which ranks split; () if it is one.
    """

    name: str
    in_features: int
    out_features: int
    group: str
    source: str
    start: int
    stop: int
    num_experts: int = 0
    is_whole: bool = False
    pieces: tuple[int, ...] = ()

    @property
    def projection(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def layer(self) -> int:
        return int(self.name.split(".")[2])

    def expert_name(self, expert: int) -> str:
        """The expert's name in adapter files, `model.layers.L.mlp.experts.E.gate_proj`."""
        parent, _, projection = self.name.rpartition(".")
        return f"{parent}.{expert}.{projection}"


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """SGLang's linear `parent.source`, whose rows are those of `parts` (Hugging Face name, rows) in this order.
    `is_whole`: ranks do not split it, every one has all rows. `pieces`: of modules whose rows are of several kinds."""

    parent: str
    source: str
    in_features: int
    parts: tuple[tuple[str, int], ...]
    group: str
    has_bias: bool = False
    is_whole: bool = False
    pieces: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def rows(self) -> Iterator[tuple[str, int, int]]:
        stops = [0]
        for _, size in self.parts:
            stops.append(stops[-1] + size)
        for (name, _), (start, stop) in zip(self.parts, pairwise(stops), strict=True):
            yield name, start, stop


class Family(ABC):
    """One model family. Instances have no state; `config` is always the content of `config.json`.

    Every method raises InvalidValueError when the config lacks a key, or has a feature that SGLang and Hugging Face
    compute differently, so that serving and training can't disagree silently.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    traits: Traits
    gguf_architecture: str
    """`general.architecture` of llama.cpp's files of this family."""
    foreign_model_types: tuple[str, ...] = ()
    """The `model_types` unknown to transformers 5.19: such a checkpoint contains its own Python modules."""
    default_epsilon: float = 1e-6
    """Epsilon of the norms for a config without `rms_norm_eps`, as in Hugging Face."""
    renamings: tuple[Renaming, ...] = ()
    """Where the family's checkpoints name tensors otherwise than transformers 5."""
    fuses_experts: bool = False
    """Whether its published checkpoints hold a layer's experts in one tensor for each projection, as transformers: in
    `gate_up_proj` and `down_proj`."""
    peft_experts: Literal["pairs", "fused", "none"] = "pairs"
    """How PEFT 0.21 reads LoRA on routed experts, which transformers has fused: it fuses the pairs of a file;
    or it knows the fused parameters only, `mlp.experts.gate_up_proj`; or neither, and drops the pairs."""
    mlp_name: str = "mlp"
    """A layer's module that is a dense MLP or has experts; in it `shared_name` and `router_name`."""
    shared_name: str = "shared_experts"
    router_name: str = "gate"
    weighs_input: bool = False
    """Whether the routing weight multiplies the expert's input, not its result."""
    rotary_table: str = "model.layers.0.self_attn.rotary_emb.cos_sin_cache"
    """SGLang's buffer of rotary tables, one for all layers: by position, cosines and then sines."""
    keeps_states: bool = False
    """Whether some layers keep a state for each sequence in addition to keys and values: SGLang then has pages of one
    token, and no host or disk tier."""
    chooses_keys: bool = False
    """Whether an indexer chooses the keys that a query sees; `index_size` is then above 0."""
    splits_over_ranks: bool = False
    """Whether ranks share its models: each layer is split, and has the bits of one process (docs/scale.md)."""
    unlisted_lora_targets: tuple[str, ...] = ()
    """Projections that SGLang's option `--lora-target-modules` does not know, though its LoRA layers do."""

    @abstractmethod
    def check(self, config: Config) -> None:
        """Refuses variants of the architecture on which SGLang and the twin would differ."""

    @abstractmethod
    def attention(self, config: Config) -> list[FusedLinear]:
        """The linears of `self_attn`, relative to the layer."""

    @abstractmethod
    def attention_norms(self, config: Config) -> dict[str, int]:
        """Sizes of the norms of `self_attn`, by name relative to the layer."""

    def linears_of(self, config: Config, layer: int) -> list[FusedLinear]:
        """The adaptable linears of the layer's attention, for a family whose layers differ in it."""
        return self.attention(config)

    def norms_of(self, config: Config, layer: int) -> dict[str, int]:
        """The norms of the layer's attention, for a family whose layers differ in it."""
        return self.attention_norms(config)

    def other_tensors(self, config: Config, layer: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the layer's further parameters, by name relative to the layer: those that nothing adapts."""
        return {}

    def rotary_table_of(self, config: Config) -> str:
        return self.rotary_table

    def attending_layers(self, config: Config) -> int:
        """The number of layers that cache keys and values."""
        return integer(config, "num_hidden_layers")

    def index_size(self, config: Config) -> int:
        """Numbers that a layer caches of a token for its indexer, after keys and values."""
        return 0

    def state_numbers(self, config: Config) -> tuple[int, int]:
        """Size of one sequence's state in all layers: numbers of the model's dtype, and float32 numbers."""
        return 0, 0

    def softmax_normalises(self, config: Config) -> bool | None:
        """Whether a softmax router's weights of a token sum to 1; None: the router is not a softmax of all logits."""
        stack = self.decoder_stack(config)
        return stack.normalises if stack is not None and stack.groups is None else None

    @abstractmethod
    def moe_layers(self, config: Config) -> list[int]:
        """The layers that have routed experts."""

    @abstractmethod
    def num_experts(self, config: Config) -> int: ...

    def shared_intermediate(self, config: Config) -> int:
        """Intermediate size of the shared experts, which form one MLP; 0 without shared experts."""
        return 0

    def has_correction_bias(self, config: Config) -> bool:
        """True if the router selects experts with a bias per expert, which does not enter their weights."""
        return False

    def has_router_bias(self, config: Config) -> bool:
        """True if the router's logits have a bias."""
        return False

    def window(self, config: Config, layer: int) -> int:
        """Keys that a query of this layer sees at most, its own included; 0: all before it."""
        return 0

    def attention_vectors(self, config: Config) -> dict[str, int]:
        """Sizes of the parameters of `self_attn` that are neither linears nor norms, by name relative to the layer."""
        return {}

    def num_experts_per_tok(self, config: Config) -> int:
        return integer(config, "num_experts_per_tok")

    def decoder_stack(self, config: Config) -> DecoderStack | None:
        """The table of the native step; None: the family has none, and SGLang's modules compute it."""
        return None

    def rotates_adjacent(self, config: Config) -> bool:
        """Whether the rotary embedding rotates pairs of adjacent elements, else of elements half a head apart."""
        return False

    def rotary_table_numbers(self, config: Config, positions: int | None) -> int:
        """Numbers of the rotary table for contexts of so many positions, None: the model's; 0: not worth counting."""
        return 0

    def expert_prefix(self, layer: int) -> str:
        return f"model.layers.{layer}.{self.mlp_name}.experts"

    def router_module(self, layer: int) -> str:
        """The module with the router's matrix."""
        return f"model.layers.{layer}.{self.mlp_name}.{self.router_name}"

    def our_name(self, stored: str) -> str:
        """transformers' name of a checkpoint's tensor."""
        return naming.to_ours(self.renamings, naming.without_wrapper(stored))

    def stored_name(self, ours: str) -> str:
        """The name that published checkpoints have for transformers' tensor `ours`; SGLang's loader expects it."""
        return naming.to_stored(self.renamings, ours)

    def engine_name(self, ours: str) -> str:
        """The SGLang parameter that holds transformers' tensor `ours` alone."""
        return self.stored_name(ours)

    def correction_bias_name(self, layer: int) -> str:
        return f"{self.router_module(layer)}.e_score_correction_bias"

    def is_offset(self, name: str) -> bool:
        """Whether Hugging Face's tensor `name` is of a norm that multiplies by one more than its weight."""
        return False

    def missing_keys(self, config: Config) -> dict[str, Any]:
        """Keys that SGLang reads and transformers 5 does not write, with the values that its model has anyway."""
        return {}

    def expert_shape(self, config: Config) -> tuple[int, int, int]:
        """(experts, hidden size, intermediate size) of a layer's routed experts."""
        return self.num_experts(config), integer(config, "hidden_size"), self.expert_intermediate(config)

    def expert_mlp(self, config: Config) -> ExpertMlp:
        """What its routed experts compute, and how fused tensors hold their matrices."""
        return ExpertMlp()

    def dense_intermediate(self, config: Config) -> int:
        return integer(config, "intermediate_size")

    def expert_intermediate(self, config: Config) -> int:
        return integer(config, "moe_intermediate_size")

    def heads_to_split(self, config: Config) -> dict[str, int]:
        """Heads that ranks share evenly: numbers by what they are, plurals."""
        return {"attention heads": integer(config, "num_attention_heads")}

    def numbers_to_split(self, config: Config) -> dict[str, int]:
        """All that ranks share evenly: numbers by what they are, plurals."""
        found = {**self.heads_to_split(config), "hidden units": integer(config, "hidden_size")}
        if len(self.moe_layers(config)) < integer(config, "num_hidden_layers"):
            found["units of dense layers"] = self.dense_intermediate(config)
        if shared := self.shared_intermediate(config):
            found["units of shared experts"] = shared
        return {**found, "routed experts": self.num_experts(config)}

    def twin_sources(self, config: Config) -> list[TensorSource]:
        """Every parameter of the twin except the routed experts', and the persistent buffers that SGLang has.

        A plan of memory asks a dozen times: of equal configs the list is made once.
        """
        return _made_once(type(self)._made_twin_sources, self, config)

    def _made_twin_sources(self, config: Config) -> list[TensorSource]:
        self.check(config)
        hidden, vocabulary = integer(config, "hidden_size"), integer(config, "vocab_size")
        embedding = "model.embed_tokens.weight"
        head = embedding if config.get("tie_word_embeddings") else "lm_head.weight"
        sources = [TensorSource(embedding, embedding, 0, vocabulary, (vocabulary, hidden))]
        for layer in range(integer(config, "num_hidden_layers")):
            sources += self._layer_sources(config, layer)
        sources.append(_whole("model.norm.weight", hidden))
        sources.append(TensorSource("lm_head.weight", head, 0, vocabulary, (vocabulary, hidden)))
        return sources

    def lora_modules(self, config: Config) -> list[LoraModule]:
        """Every linear that can be adapted, in the order of the model. Router, embeddings and lm_head never are.

        Loading an adapter asks a dozen times: of equal configs the list is made once.
        """
        return _made_once(type(self)._made_lora_modules, self, config)

    def _made_lora_modules(self, config: Config) -> list[LoraModule]:
        self.check(config)
        moe_layers = set(self.moe_layers(config))
        modules: list[LoraModule] = []
        for layer in range(integer(config, "num_hidden_layers")):
            prefix = f"model.layers.{layer}."
            for linear in self._linears(config, layer):
                modules += self._adaptable(prefix, linear)
            if layer in moe_layers:
                modules += self._expert_modules(config, layer)
        return modules

    def projections(self, config: Config) -> list[str]:
        """The distinct last names of `lora_modules`, in their order: the required list for `--lora-target-modules`."""
        return list(dict.fromkeys(module.projection for module in self.lora_modules(config)))

    def sglang_lora_targets(self, config: Config) -> list[str]:
        """The value for SGLang's `--lora-target-modules`; SGLang itself maps these names to its fused modules.

        Never SGLang's `all`, which adds embed_tokens and lm_head: they are not adapted here.
        """
        return [name for name in self.projections(config) if name not in self.unlisted_lora_targets]

    def _linears(self, config: Config, layer: int) -> list[FusedLinear]:
        linears = self.linears_of(config, layer)
        hidden = integer(config, "hidden_size")
        if layer not in set(self.moe_layers(config)):
            linears += _gated_mlp(self.mlp_name, hidden, self.dense_intermediate(config), MLP)
        elif shared := self.shared_intermediate(config):
            linears += _gated_mlp(f"{self.mlp_name}.{self.shared_name}", hidden, shared, SHARED)
        return linears

    def _layer_sources(self, config: Config, layer: int) -> list[TensorSource]:
        prefix, hidden = f"model.layers.{layer}.", integer(config, "hidden_size")
        linears = self._linears(config, layer)
        sources = [source for linear in linears for source in self._linear_sources(prefix, linear)]
        sources += [self._own(f"{prefix}{name}.weight", size) for name, size in self.norms_of(config, layer).items()]
        sources += [_whole(f"{prefix}{name}", size) for name, size in self.attention_vectors(config).items()]
        sources += [self._own(f"{prefix}{name}", *shape) for name, shape in self.other_tensors(config, layer).items()]
        sources += [
            _whole(f"{prefix}{name}.weight", hidden) for name in ("input_layernorm", "post_attention_layernorm")
        ]
        if layer in set(self.moe_layers(config)):
            experts = self.num_experts(config)
            sources.append(self._own(f"{self.router_module(layer)}.weight", experts, hidden))
            if self.has_router_bias(config):
                sources.append(self._own(f"{self.router_module(layer)}.bias", experts))
            if self.has_correction_bias(config):
                sources.append(self._own(self.correction_bias_name(layer), experts, is_buffer=True))
        return sources

    def _linear_sources(self, prefix: str, linear: FusedLinear) -> Iterator[TensorSource]:
        parent = f"{prefix}{linear.parent}."
        source = self.engine_name(f"{parent}{linear.source}.")
        for name, start, stop in linear.rows():
            shape = (stop - start, linear.in_features)
            yield TensorSource(f"{parent}{name}.weight", f"{source}weight", start, stop, shape)
            if linear.has_bias:
                yield TensorSource(f"{parent}{name}.bias", f"{source}bias", start, stop, shape[:1])

    def _adaptable(self, prefix: str, linear: FusedLinear) -> Iterator[LoraModule]:
        parent = f"{prefix}{linear.parent}."
        source = self.engine_name(f"{parent}{linear.source}.").removesuffix(".")
        for name, start, stop in linear.rows():
            yield LoraModule(
                f"{parent}{name}",
                linear.in_features,
                stop - start,
                linear.group,
                source,
                start,
                stop,
                is_whole=linear.is_whole,
                pieces=dict(linear.pieces).get(name, ()),
            )

    def _own(self, name: str, *shape: int, is_buffer: bool = False) -> TensorSource:
        return TensorSource(name, self.engine_name(name), 0, shape[0], shape, is_buffer)

    def _expert_modules(self, config: Config, layer: int) -> list[LoraModule]:
        experts, hidden, intermediate = self.expert_shape(config)
        prefix = self.expert_prefix(layer)
        parent = self.engine_name(f"{prefix}.").removesuffix(".")
        both, down = f"{parent}.w13", f"{parent}.w2"
        i = intermediate
        return [
            LoraModule(f"{prefix}.gate_proj", hidden, i, EXPERTS, both, 0, i, experts),
            LoraModule(f"{prefix}.up_proj", hidden, i, EXPERTS, both, i, 2 * i, experts),
            LoraModule(f"{prefix}.down_proj", i, hidden, EXPERTS, down, 0, hidden, experts),
        ]


def integer(config: Config, key: str, *aliases: str) -> int:
    """The positive integer `config[key]`; `aliases` are other spellings. Raises InvalidValueError naming the key."""
    value = next((config[name] for name in (key, *aliases) if config.get(name) is not None), None)
    if value is None:
        raise InvalidValueError(f"config.json: {key!r} is missing; expected a positive integer")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidValueError(f"config.json: {key!r} is {value!r}; expected a positive integer")
    return value


def first_moe_layer(config: Config) -> int:
    """The first layer with routed experts, after the dense ones (`first_k_dense_replace`). Raises InvalidValueError
    unless at least one layer has them.
    """
    layers, first = integer(config, "num_hidden_layers"), config.get("first_k_dense_replace")
    if not isinstance(first, int) or isinstance(first, bool) or not 0 <= first < layers:
        raise InvalidValueError(
            f"config.json: 'first_k_dense_replace' is {first!r}; expected 0 to {layers - 1} "
            f"(num_hidden_layers is {layers} and one layer at least must have routed experts)"
        )
    return first


def require(config: Config, key: str, value: Any, reason: str, *, default: Any = None) -> None:
    """Raises InvalidValueError unless `config[key]` (`default` if missing) is `value`."""
    found = config.get(key, default)
    if found != value:
        raise InvalidValueError(f"config.json: {key!r} is {found!r}; only {value!r} can be used: {reason}")


def _made_once(make: Callable[[Any, Config], list[_T]], family: Family, config: Config) -> list[_T]:
    """`make(family, config)`, which is called once for equal configs."""
    try:
        encoded = msgspec.json.encode(config)
    except TypeError:  # not the content of a file
        return make(family, config)
    return list(_made(make, family, encoded))


@lru_cache(maxsize=16)
def _made(make: Callable[[Any, Config], list[_T]], family: Family, encoded: bytes) -> tuple[_T, ...]:
    """`encoded`: the config as JSON."""
    return tuple(make(family, msgspec.json.decode(encoded)))


def _gated_mlp(parent: str, hidden: int, intermediate: int, group: str) -> list[FusedLinear]:
    parts = (("gate_proj", intermediate), ("up_proj", intermediate))
    return [
        FusedLinear(parent, "gate_up_proj", hidden, parts, group),
        FusedLinear(parent, "down_proj", intermediate, (("down_proj", hidden),), group),
    ]


def _whole(name: str, *shape: int, is_buffer: bool = False) -> TensorSource:
    return TensorSource(name, name, 0, shape[0], shape, is_buffer)
