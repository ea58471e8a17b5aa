"""The twin's linear layers over ranks: each rank has some outputs of every layer, and gets the bits of one process.

Activations at the layers' boundaries are whole on every rank, and so are their gradients. In between, ranks have
columns: q, k and v those of some heads, the output projection some of its outputs.

| | forward | backward |
|---|---|---|
| q, k, v; gate, up of an MLP | whole x -> own outputs | own outputs' gradients, exchanged -> own columns of x's |
| norm of all heads at once | own heads, exchanged -> all heads -> own | own gradients, exchanged -> all -> own |
| attention, SwiGLU | own heads, own columns | own heads, own columns |
| output projection, down | own, exchanged -> own outputs, exchanged | whole gradient -> own inputs' gradients |
| into attention, into an MLP (`entered`) | – | own columns of x's gradient, exchanged |

A column of a product depends on its own row of the weight alone, so columns can be computed anywhere. The gradient of a
layer's input is a sum over all rows of the weight, in their order; nothing is added up between ranks. For backward a
rank therefore needs, in addition to its rows of each weight, all rows of its columns (`SplitWeight.columns`), which are
of the same size. Ranks that share memory send each other these columns for each layer, and free them after it. Others
do so once, when training begins, and hold them; of a matrix that stays quantized each rank reads them then.

Between the product with the base and the exchange of the results, a layer's activations have their whole width, of
which a rank has its columns (`Share.placed`): autograd then adds up gradients in the order of one process.

LoRA: A is whole on every rank, B has the rank's outputs. For the gradient of A, ranks exchange B.

Shapes: T tokens, I inputs, O outputs of the whole layer, N ranks, R LoRA rank.
"""

from __future__ import annotations

import types
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kt_runtime.experts import dense
from kt_runtime.experts.collected import Place, place_of
from kt_runtime.experts.packed.weight import PackedWeight
from kt_runtime.families import TensorSource
from kt_runtime.ops.matmul import gradient_product, lora_product, master_gradient, served_product
from kt_runtime.ranks import Exchange, Pieces, Share
from kt_runtime.resident.fingerprint import WeightPart
from kt_runtime.resident.memory import FreedMemory
from kt_runtime.resident.scheduler import Slice
from kt_runtime.resident.twin.frozen import FrozenLinear, FrozenRmsNorm, GatedMlp
from kt_runtime.resident.twin.lora_linear import LoraLinear

VOCABULARIES = ("model.embed_tokens.weight", "lm_head.weight")
BY_HEADS = (
    *("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj"),
    *("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)
"""Linear layers of attention, and of Gated DeltaNet, whose outputs are heads."""
OF_HEADS = ("sinks", "A_log", "dt_bias", "conv1d.weight")
"""Further parameters of attention that ranks split by heads."""


class SplitWeight:
    """A frozen weight [O, I]. `rows`: this rank's, [O / N, I], and `bias` [O / N]; `outputs`: which of all they are.
    `columns`: all rows of its columns, [O, I / N]; None until `fetch`. `is_held`: while a session is open, and not for
    a layer's backward pass alone."""

    def __init__(
        self, rows: Tensor, exchange: Exchange, bias: Tensor | None = None, pieces: tuple[int, ...] = ()
    ) -> None:
        self.rows, self.exchange, self.bias = rows, exchange, bias
        self.outputs = Pieces(exchange.share, pieces or (len(rows) * exchange.share.num_ranks,))
        self.columns: Tensor | None = None
        self.is_held = not exchange.shares_memory or isinstance(rows.detach(), PackedWeight)

    def all_outputs(self, own: Tensor) -> Tensor:
        """[..., O / N] of each rank -> [..., O]."""
        return self.outputs.ordered(all_columns(self.exchange, own))

    def fetch(self) -> None:
        """All ranks make this call; backward needs it."""
        rows = self.rows.detach()
        if self.columns is None and isinstance(rows, PackedWeight):
            self.columns = rows.columns(self.exchange.share.of(rows.shape[1], "inputs"))
        elif self.columns is None:
            joined = self.exchange.columns_of_rows(rows, [len(rows)] * self.exchange.share.num_ranks)
            self.columns = self.outputs.ordered(joined, 0)

    def by_input(self, by_out: Tensor) -> Tensor:
        """by_out [..., O], whole -> this rank's columns of the input's gradient, [..., I / N]. All ranks make this
        call."""
        self.fetch()
        assert self.columns is not None
        return gradient_product(by_out, self.columns[: by_out.shape[-1]])


class _Product(torch.autograd.Function):
    """x [..., I] -> [..., O], of which this rank has its columns. Of the gradient of x it has its columns, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: SplitWeight) -> Tensor:
        ctx.weight, ctx.num_inputs = weight, x.shape[-1]
        return weight.outputs.placed(dense.linear(x, weight.rows, weight.bias))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.weight.exchange.share.placed(ctx.weight.by_input(grads[0]), ctx.num_inputs), None


class _Added(torch.autograd.Function):
    """base [T, O] + low [T, R] B^T, of which this rank has its columns; `master`: B^T with these alone, [R, O / N]."""

    @staticmethod
    def forward(
        ctx: Any, low: Tensor, master: Tensor, base: Tensor, weight: SplitWeight, place: Place | None
    ) -> Tensor:
        served, outputs = master.to(low.dtype), weight.outputs
        ctx.save_for_backward(low, served)
        ctx.weight, ctx.master_dtype, ctx.place = weight, master.dtype, place
        return outputs.placed(lora_product(low, served, base=outputs.own(base)))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        low, served = ctx.saved_tensors
        own = ctx.weight.outputs.own(grads[0])
        by_low = lora_product(grads[0], ctx.weight.all_outputs(served).mT) if ctx.needs_input_grad[0] else None
        by_master = None
        if ctx.place is not None:
            ctx.place.collected.keep(ctx.place, low, own, 1.0)
        elif ctx.needs_input_grad[1]:
            by_master = master_gradient(low, own).to(ctx.master_dtype)
        return by_low, by_master, grads[0] if ctx.needs_input_grad[2] else None, None, None


class _Entered(torch.autograd.Function):
    """Whole x -> x. Of the gradient that arrives this rank has its columns; it leaves whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_columns(ctx.exchange, ctx.exchange.share.columns_of(grads[0])), None


class _OwnOutputs(torch.autograd.Function):
    """`_Own` of a weight's outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: SplitWeight) -> Tensor:
        ctx.weight = weight
        return weight.outputs.own(x).contiguous()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.weight.all_outputs(grads[0]), None


class _Own(torch.autograd.Function):
    """[..., O], of which this rank has its columns -> these alone. The gradient leaves whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.share.columns_of(x).contiguous()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_columns(ctx.exchange, grads[0]), None


class _Gathered(torch.autograd.Function):
    """This rank's columns [..., I / N] -> those of all, [..., I]. Backward takes its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return all_columns(exchange, x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.share.columns_of(grads[0]).contiguous(), None


class _Completed(torch.autograd.Function):
    """[..., O], of which this rank has its columns -> whole. Its gradient is whole, and passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        return all_columns(exchange, exchange.share.columns_of(x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def all_columns(exchange: Exchange, part: Tensor) -> Tensor:
    """[..., C] of each rank -> [..., N C]."""
    return exchange.all_columns(part.reshape(-1, part.shape[-1]).contiguous()).view(*part.shape[:-1], -1)


@dataclass(frozen=True)
class Heads:
    """Heads that ranks share, each n of N; with one rank (`exchange` None) n is N, and nothing is done.

    Tensors end with heads and their elements, [..., n, D] or [..., N, D].
    """

    exchange: Exchange | None

    def count(self, own: int) -> int:
        """The number N of all heads, from the rank's number n."""
        return own if self.exchange is None else own * self.exchange.share.num_ranks

    def part(self, x: Tensor) -> Tensor:
        """[..., N, D] -> this rank's heads, without a gradient."""
        if self.exchange is None:
            return x
        own = self.exchange.share.of(x.shape[-2], "heads")
        return x[..., own.start : own.stop, :].contiguous()

    def joined(self, x: Tensor, *, wanted: bool) -> Tensor:
        """[..., n, D] -> [..., N, D], without a gradient. Not `wanted`: nobody reads the heads of others."""
        if self.exchange is None:
            return x
        columns = x.flatten(-2)
        share = self.exchange.share
        whole = all_columns(self.exchange, columns) if wanted else share.placed(columns, self.count(columns.shape[-1]))
        return whole.unflatten(-1, (-1, x.shape[-1]))

    def all(self, x: Tensor) -> Tensor:
        """[..., n, D] -> [..., N, D]; its gradient is whole. Without autograd nobody reads the heads of others."""
        if self.exchange is None or not torch.is_grad_enabled():
            return self.joined(x, wanted=False)
        found: Tensor = _Gathered.apply(x.flatten(-2), self.exchange)
        return found.unflatten(-1, (-1, x.shape[-1]))

    def own(self, x: Tensor) -> Tensor:
        """[..., N, D] -> [..., n, D]; the gradient leaves whole."""
        if self.exchange is None:
            return x
        found: Tensor = _Own.apply(x.flatten(-2), self.exchange)
        return found.unflatten(-1, (-1, x.shape[-1]))

    def entered(self, x: Tensor) -> Tensor:
        """A whole input of a split layer: of its gradient, which leaves whole, this rank's columns arrive."""
        found: Tensor = x if self.exchange is None else _Entered.apply(x, self.exchange)
        return found


class SplitLinear(FrozenLinear):
    """q, k, v, gate or up: takes the whole input, gives this rank's outputs. `weight`: its rows [O / N, I]."""

    split: SplitWeight
    pieces: tuple[int, ...] = ()
    """As of `LoraModule`."""

    def taken(self, x: Tensor) -> Tensor:
        return x

    def given(self, out: Tensor) -> Tensor:
        found: Tensor = _OwnOutputs.apply(out, self.split)
        return found

    def product(self, x: Tensor) -> Tensor:
        found: Tensor = _Product.apply(x, self.split)
        return found

    def added(self, low: Tensor, b: Tensor, base: Tensor) -> Tensor:
        """b [O / N, R]: this rank's part of the master."""
        master = b.T
        found: Tensor = _Added.apply(low, master, base, self.split, place_of(master))
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.given(self.product(self.taken(x)))


class SplitOutput(SplitLinear):
    """The output projection, or down: takes this rank's heads, or columns, gives the whole output."""

    def taken(self, x: Tensor) -> Tensor:
        found: Tensor = _Gathered.apply(x, self.split.exchange)
        return found

    def given(self, out: Tensor) -> Tensor:
        found: Tensor = _Completed.apply(out, self.split.exchange)
        return found


class SplitLoraLinear(LoraLinear):
    """LoRA on a `SplitLinear`. Its input and result are those of the base; A [R, I], B [O / N, R]."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        base = self.base_layer
        assert isinstance(base, SplitLinear)
        x = base.taken(x)
        result = base.product(x)
        for key, (a, b, scaling) in zip(self._active_here(), self.active_lora(), strict=True):
            low = served_product(self.lora_dropout[key](x).flatten(0, -2), a.T, alpha=scaling)
            result = base.added(low, b, result.flatten(0, -2)).view(result.shape)
        return base.given(result)


class SplitNorm(FrozenRmsNorm):
    """A norm over all heads at once: takes and gives this rank's heads [..., O / N]. `weight`: whole, [O]."""

    exchange: Exchange

    def forward(self, hidden_states: Tensor) -> Tensor:
        found: Tensor = _Own.apply(super().forward(_Gathered.apply(hidden_states, self.exchange)), self.exchange)
        return found


class SplitVocabulary:
    """A table [V, H], embeddings or head: each rank has as many consecutive rows, and the last ones may be padding."""

    def __init__(self, rows: Tensor, vocabulary: int, exchange: Exchange) -> None:
        self.weight, self._vocabulary = SplitWeight(rows.detach(), exchange), vocabulary

    @property
    def shape(self) -> tuple[int, int]:
        return self._vocabulary, self.weight.rows.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.rows.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [B, S] -> [B, S, H]."""
        rows, share = self.weight.rows, self.weight.exchange.share
        flat = tokens.flatten()
        own = (flat - share.rank * len(rows)).clamp(0, len(rows) - 1)
        everyone = self.weight.exchange.all_columns(rows[own]).unflatten(-1, (share.num_ranks, -1))
        owners = torch.div(flat, len(rows), rounding_mode="floor")
        return everyone[torch.arange(len(flat)), owners].view(*tokens.shape, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, H] -> [M, V] in hidden's dtype."""
        padded = self.weight.exchange.all_columns(dense.linear(hidden, self.weight.rows))
        return padded[:, : self._vocabulary].contiguous()

    def by_hidden(self, by_logits: Tensor) -> Tensor:
        """[M, V] -> [M, H]."""
        return self.weight.exchange.all_columns(self.weight.by_input(by_logits))


def split_attention(attention: Any, exchange: Exchange) -> None:
    """Patches an attention module of Hugging Face with q, k, v and output projection over ranks. The rows of their
    weights are placed later. Of latent attention the queries and `kv_b_proj` are split, the rest is whole; Gated
    DeltaNet is split by key heads, each with its value heads."""
    for name in BY_HEADS:
        if (linear := getattr(attention, name, None)) is not None:
            linear.__class__ = SplitLinear
    getattr(attention, "o_proj" if hasattr(attention, "o_proj") else "out_proj").__class__ = SplitOutput
    for name in ("in_proj_qkv", "conv1d"):
        if (module := getattr(attention, name, None)) is not None:
            module.pieces = (attention.key_dim, attention.key_dim, attention.value_dim)
    for name in ("num_k_heads", "num_v_heads"):  # of Gated DeltaNet
        if hasattr(attention, name):
            setattr(attention, name, getattr(attention, name) // exchange.share.num_ranks)
    for name in ("q_norm", "k_norm"):
        norm = getattr(attention, name, None)
        if norm is not None and norm.weight.shape[0] != attention.head_dim:
            norm.__class__, norm.exchange = SplitNorm, exchange
    if getattr(attention, "q_b_proj", None) is None:  # whose input is another one (`Heads.entered`)
        _enter(attention, exchange)


def split_mlps(block: Any, exchange: Exchange) -> None:
    """The same for the MLPs in a layer's `block`: a dense one, or shared experts. Routed experts are split elsewhere
    (`kt_runtime.ranks`): their gradients are whole."""
    mlps = [module for module in block.modules() if isinstance(module, GatedMlp)]
    for mlp in mlps:
        mlp.gate_proj.__class__ = mlp.up_proj.__class__ = SplitLinear
        mlp.down_proj.__class__ = SplitOutput
    if mlps:
        _enter(block, exchange)


def _enter(module: Any, exchange: Exchange) -> None:
    """The gradient of the module's input is completed over ranks, once it is summed up."""
    forward = module.forward

    def entering(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
        return forward(_Entered.apply(hidden_states, exchange), **kwargs)

    module.forward = types.MethodType(entering, module)


def own_source(source: TensorSource, model: nn.Module, engine: Mapping[str, Tensor], share: Share) -> TensorSource:
    """Where this rank's part of the tensor lies among its engine's; `source`: where one process has it.

    A fused layer's rows are split part by part. Each rank has as many rows of the vocabulary, padding included.
    """
    parent = source.name.rpartition(".")[0]
    if isinstance(model.get_submodule(parent), SplitLinear) or source.name.endswith(OF_HEADS):
        count = len(share.of(source.stop - source.start, "outputs"))
        start = source.start // share.num_ranks
        return replace(source, start=start, stop=start + count, shape=(count, *source.shape[1:]))
    if source.name in VOCABULARIES and source.source in engine:
        count = len(engine[source.source])
        return replace(source, start=0, stop=count, shape=(count, *source.shape[1:]))
    return source


def part_of(source: TensorSource, own: Tensor, model: nn.Module, num_ranks: int) -> WeightPart:
    """A rank's part of the weight that one process has as `source`. `own`: the twin's tensor."""
    if tuple(own.shape) == source.shape:
        return WeightPart(own, source.shape)
    module: Any = model.get_submodule(source.name.rpartition(".")[0])
    return WeightPart(own, source.shape, getattr(module, "pieces", ()) or (num_ranks * len(own),))


class SplitParts:
    """The split parts of a twin, whose parameters are this rank's rows already.

    `embedding`, `head`: tables [V, H], also where both are one. `freed`: bounds the memory that a microbatch's slices
    free.
    """

    def __init__(self, model: Any, vocabulary: int, exchange: Exchange, share_bytes: int) -> None:
        """`share_bytes`: size of this rank's weights."""
        self._exchange, self.freed = exchange, FreedMemory(share_bytes)
        self._weights = []
        for module in model.modules():
            if isinstance(module, SplitLinear):
                module.split = SplitWeight(module.weight.detach(), exchange, module.bias, module.pieces)
                self._weights.append(module.split)
        self.embedding = SplitVocabulary(model.model.embed_tokens.weight, vocabulary, exchange)
        self.head = SplitVocabulary(model.lm_head.weight, vocabulary, exchange)
        self._each = (*self._weights, self.head.weight)

    def kept(self, hidden: Tensor) -> Tensor:
        """This rank's columns of a layer's input [B, S, H], which every rank has: what of it waits for backward."""
        return self._exchange.share.columns_of(hidden).contiguous()

    def whole(self, kept: Tensor) -> Tensor:
        """The input of which each rank has `kept`. All ranks make this call."""
        return all_columns(self._exchange, kept)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of the columns that this rank holds for backward."""
        return sum(weight.columns.nbytes for weight in self._each if weight.columns is not None)

    def fetch(self) -> Generator[Slice, None, None]:
        """Fetches the columns that are held while a session is open. All ranks run the slices, in the same order."""
        for weight in self._each:
            if weight.is_held:
                yield Slice("columns for backward", weight.rows.numel(), may_switch=True)
                weight.fetch()

    def release(self) -> None:
        """Frees the columns of a layer, or of the head, whose backward pass has ended, unless they are held."""
        for weight in self._each:
            if not weight.is_held:
                weight.columns = None

    def forget(self) -> None:
        """Frees all columns: the last session has ended."""
        for weight in self._each:
            weight.columns = None
