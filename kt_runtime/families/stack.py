"""A family's decoder stack as a table, from which the native step (csrc/step) is built, and what its experts compute.

Tensors are named as SGLang 0.5.23 names them (`model.named_parameters()`). A bias is None where there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kt_runtime.errors import InvalidValueError, UnknownNameError

SILU: Final = "silu"
SILU_CLAMPED: Final = "silu_clamped"
SWIGLU_OAI: Final = "swigluoai"
RELU_SQUARED: Final = "relu2"
ACTIVATIONS: Final = (SILU, SILU_CLAMPED, SWIGLU_OAI, "gelu", "gelu_pytorch_tanh", RELU_SQUARED)
"""Activations of routed experts (csrc/kernels/activation.h), by the names that configs have for them."""
OF_CONFIG: Final = {"swish": SILU, "gelu_tanh": "gelu_pytorch_tanh"} | {name: name for name in ACTIVATIONS}


@dataclass(frozen=True, slots=True)
class GroupedQuery:
    """Grouped-query attention. `qkv`: queries, keys and values, fused. The norms are of each head's queries and keys,
    or, if they are as wide as all heads together, of all that a token has. `sinks`: a score for each head, without a
    value. `window`: keys that a query sees at most, its own included; 0: all. `is_gated`: after each head's query,
    `qkv` has as many gates, whose sigmoids multiply the head's output.

    For Llama 4: `rotates`: the layer has a rotary embedding. `unit_norms`: each head's queries and keys have norms
    without a weight, after the rotary embedding. `is_chunked`: a query sees the keys of its own chunk
    (`DecoderStack.chunk`). `temperature`: what multiplies a token's queries; None: nothing does.
    """

    qkv: str
    qkv_bias: str | None
    query_norm: str | None
    key_norm: str | None
    out: str
    out_bias: str | None
    sinks: str | None = None
    window: int = 0
    rotates: bool = True
    unit_norms: bool = False
    is_chunked: bool = False
    temperature: Temperature | None = None
    is_gated: bool = False


@dataclass(frozen=True, slots=True)
class Temperature:
    """Factor of the queries at position p: 1 + `strength` * ln(1 + floor((p + 1) / `every`)) (arXiv:2501.19399)."""

    every: int
    strength: float


@dataclass(frozen=True, slots=True)
class Indexer:
    """Chooses the keys that a query sees (DeepSeek Sparse Attention, arXiv:2512.02556). `query`: wq_b, of the
    compressed queries; `key`: wk, its norm a LayerNorm; `weights`: weights_proj. `interleaved`: its rotary embedding
    rotates adjacent elements, else those half the rotated part apart."""

    query: str
    key: str
    norm_weight: str
    norm_bias: str
    weights: str
    interleaved: bool


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (MLA) in absorbed order.

    `compress`: q_a_proj and kv_a_proj_with_mqa, fused; or, without `q_lora_rank`, kv_a_proj_with_mqa alone, and there
    is no `query_norm`. `query`: q_b_proj, or q_proj. `key_heads` and `value_heads`: what SGLang derives from kv_b_proj,
    w_kc [N, key, latent] and w_vc [N, latent, value], which are attributes of the module, not parameters.

    `seen_keys`: keys that a query sees at most, those that the `indexer` chose, or without one the indexer of an
    earlier layer; 0: all.
    """

    compress: str
    query_norm: str | None
    query: str
    latent_norm: str
    key_heads: str
    value_heads: str
    out: str
    indexer: Indexer | None = None
    seen_keys: int = 0


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Gated DeltaNet (arXiv:2412.06464): a short convolution, the gated delta rule, a gated norm of each value head.

    `inputs`: queries, keys, values and gates of the result, fused; `gates`: write strengths and decays, fused. In both
    the rows are in this order, or `by_key_head`, each key head with its value heads. `filter`: of the convolution;
    `log_rate` and `bias`: transformers' `A_log` and `dt_bias`.
    """

    inputs: str
    gates: str
    filter: str
    log_rate: str
    bias: str
    norm: str
    out: str
    key_heads: int
    by_key_head: bool


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """`gate_up`: gate and up, fused. `gate`: the sigmoid of its product multiplies the result."""

    gate_up: str
    down: str
    gate: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """What a routed expert computes: down(f(gate(x), up(x))). And which rows of fused tensors are whose.

    `activation`: f, one of ACTIVATIONS.
        silu               silu(gate) * up
        silu_clamped       silu(min(gate, limit)) * clamp(up, -limit, limit), as DeepSeek-V4
        swigluoai          g * sigmoid(alpha * g) * (clamp(up, -limit, limit) + 1), g = min(gate, limit), as gpt-oss
        gelu               gelu(gate) * up, by the error function
        gelu_pytorch_tanh  gelu(gate) * up, by the approximation with tanh
        relu2              max(up, 0)^2, without a gate, as Nemotron-H
    `has_bias`: each matrix has one; gate's and up's are added before f, down's before the routing weight multiplies.
    `is_interleaved`: the rows of `gate_up_proj` alternate, gate's first; else all of gate's come first.
    `is_transposed`: fused tensors are [E, in, out], else [E, out, in]. The last two do not concern tensors per expert.
    """

    activation: str = SILU
    limit: float | None = None
    alpha: float | None = None
    has_bias: bool = False
    is_interleaved: bool = False
    is_transposed: bool = False

    @property
    def has_gate(self) -> bool:
        return self.activation != RELU_SQUARED

    @property
    def is_plain(self) -> bool:
        """Whether it is SwiGLU without limits and biases."""
        return self.activation == SILU and not self.has_bias


def activation_of(config: Mapping[str, Any], key: str = "hidden_act") -> ExpertMlp:
    """What config.json says under `key`, "hidden_act" or "mlp_hidden_act", `swiglu_limit` and `swiglu_alpha`.

    A limit makes silu the clamped one; swigluoai's are those of gpt-oss if the config has none. gpt-oss itself says
    "silu": its table names the activation. Raises UnknownNameError for an activation that the experts can't compute,
    InvalidValueError for a limit or alpha that is no positive number.
    """
    name = config.get(key, SILU)
    if name not in OF_CONFIG:
        raise UnknownNameError("activation of experts", str(name), OF_CONFIG, f"config.json: {key!r}", typed=False)
    limit, alpha = _positive(config, "swiglu_limit"), _positive(config, "swiglu_alpha")
    activation = OF_CONFIG[name]
    if activation == SWIGLU_OAI:
        return ExpertMlp(activation, limit or 7.0, alpha or 1.702)
    if activation == SILU and limit is not None:
        return ExpertMlp(SILU_CLAMPED, limit)
    return ExpertMlp(activation, limit if activation == SILU_CLAMPED else None)


def _positive(config: Mapping[str, Any], key: str) -> float | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InvalidValueError(f"config.json: {key!r} is {value!r}; expected a number above 0")
    return float(value)


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """`bias`: of the choice of experts, in float32. `experts`: the layer's number in the expert store. `gate_bias`: of
    the logits of a softmax router."""

    gate: str
    bias: str | None
    experts: int
    gate_bias: str | None = None


@dataclass(frozen=True, slots=True)
class StackLayer:
    """One layer. `mlp`: a dense MLP, or the shared experts of a layer with routed ones."""

    input_norm: str
    attention: GroupedQuery | Latent | GatedDelta
    post_norm: str
    mlp: GatedMlp | None
    routed: RoutedExperts | None


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """A router that chooses among experts in groups, from float32 logits (csrc/ops/router/grouped_router.h).

    `is_sigmoid`: scores are sigmoids of the logits, else their softmax. `scaling`: `routed_scaling_factor`.
    """

    groups: int
    top_groups: int
    is_sigmoid: bool
    scaling: float


@dataclass(frozen=True, slots=True)
class DecoderStack:
    """`groups`: None: the router is a softmax of all logits, which have the model's dtype. `normalises`: the routing
    weights of a token sum to 1. `epsilon`: of every norm. `interleaved`: the rotary embedding rotates adjacent
    elements, else those half a head apart. `weighs_input`: the routing weight multiplies the expert's input, not its
    result; a token then has one expert. `chunk`: most keys that a query of a chunked layer sees; 0: no layer is
    chunked. `offset_norms`: the weights of the norms are offsets from one, but for those of Gated DeltaNet."""

    heads: int
    top_k: int
    normalises: bool
    groups: ExpertGroups | None
    epsilon: float
    interleaved: bool
    embedding: str
    final_norm: str
    layers: tuple[StackLayer, ...]
    weighs_input: bool = False
    chunk: int = 0
    offset_norms: bool = False

    def linear_layers(self) -> Iterator[str]:
        """The matrices of attention, dense MLPs and shared experts that `ops.matmul.frozen_linear` multiplies."""
        for layer in self.layers:
            attention = layer.attention
            if isinstance(attention, Latent):
                yield from (attention.compress, attention.query, attention.out)
            elif isinstance(attention, GatedDelta):
                yield from (attention.inputs, attention.gates, attention.out)
            else:
                yield from (attention.qkv, attention.out)
            if layer.mlp is not None:
                yield from (layer.mlp.gate_up, layer.mlp.down)
