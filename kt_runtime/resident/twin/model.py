"""The training twin: the Hugging Face model of the same config over the engine's own storage.

The model is built on the meta device. Then each parameter becomes a view of rows of an engine tensor, according to the
family's table. One module that calls the expert store replaces the routed experts (`routed.py`). A parameter that is
missing in the table or in the engine is an error at start, never a silent copy.

On a machine without a GPU every operation between token ids and log-probabilities is one function for serving and
training (`kt_runtime.ops`, `attention.py`), so both get the same bits. The rotary table is the engine's, and must be
there. On a GPU Hugging Face's module computes the table.

With several ranks, each has a part of the engine's tensors, and the twin has views of these (`split.py`). Its methods
then take and return whole activations, equal on all ranks.

The model's own `forward` is not used. The slices call embedding, layers, norm and head separately, so no mask is built
and nothing is cached.

Shapes: B sequences, S tokens of each, H hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from kt_runtime.errors import CheckpointError, InvalidValueError, suggestion
from kt_runtime.experts.packed.weight import PackedWeight
from kt_runtime.families import Family, TensorSource, family_for
from kt_runtime.families.stack import DecoderStack, Latent
from kt_runtime.ops.rotary import Rotary
from kt_runtime.resident.fingerprint import WeightPart
from kt_runtime.resident.host import Host
from kt_runtime.resident.twin import attention, delta_net, llama4
from kt_runtime.resident.twin.attention import Positions
from kt_runtime.resident.twin.frozen import (
    FrozenLinear,
    FrozenOffsetNorm,
    FrozenRmsNorm,
    GatedMlp,
    is_gated_mlp,
    is_offset_norm,
    is_rms_norm,
)
from kt_runtime.resident.twin.replay import LayerRoutes
from kt_runtime.resident.twin.routed import GroupedRouter, RoutedExperts, SoftmaxRouter, grouped_router
from kt_runtime.resident.twin.split import SplitParts, SplitVocabulary, own_source, part_of, split_attention, split_mlps


class Twin:
    """`experts`: module name -> routed-expert module, for each MoE layer. `device`, `dtype`: the engine's. `split`: the
    parts of several ranks, None with one."""

    def __init__(self, host: Host) -> None:
        self.family: Family = family_for(host.config)
        if self.family.chooses_keys and not host.attends_in_float32:
            raise InvalidValueError(
                f"the queries of {self.family.name} see the keys that an indexer chooses: it is computed on a CPU only"
            )
        self.device, self.dtype = host.device, host.dtype
        self._store = host.experts
        self._attends_in_float32 = host.attends_in_float32
        self.exchange = host.exchange
        self.experts: dict[str, RoutedExperts] = {}
        with torch.inference_mode(False), torch.no_grad():
            self._model = _on_meta(self.family, host)
            self._chunks = _chunks(self.family, host.config)
            self._place_experts(host.config)
            whole, tensors = self.family.twin_sources(host.config), host.tensors()
            sources, num_ranks = whole, 1
            if host.exchange is not None:
                share = host.exchange.share
                num_ranks = share.num_ranks
                sources = [own_source(source, self._model, tensors, share) for source in whole]
            self._views = _share(self._model, sources, tensors)
            self._parts = {
                source.name: part_of(source, self._views[source.name], self._model, num_ranks) for source in whole
            }
            self._angles = (
                _engine_tensor("rotary table", self.family.rotary_table_of(host.config), tensors).to(host.dtype)
                if host.attends_in_float32
                else None
            )
            self._interleaved = self.family.rotates_adjacent(host.config)
            self._windows = [self.family.window(host.config, layer) for layer in range(self.num_layers)]
            self._model.model.rotary_emb = type(self._model.model.rotary_emb)(self._model.config).to(host.device)
            self.shared_bytes = sum(view.nbytes for view in self._views.values()) + host.experts.resident_bytes
            self.split = (
                None
                if host.exchange is None
                else SplitParts(self._model, self.vocabulary, host.exchange, self.shared_bytes)
            )
        self._refuse_leftovers()
        self._model.eval()
        self._copied_bytes = bytes_not_shared(self._model, tensors)

    @property
    def copied_bytes(self) -> int:
        """Bytes of weights that the twin holds in addition to the engine's."""
        return self._copied_bytes + (0 if self.split is None else self.split.fetched_bytes)

    @property
    def num_layers(self) -> int:
        return int(self._model.config.num_hidden_layers)

    @property
    def routed_layers(self) -> list[int]:
        """Layers with routed experts, ascending."""
        return [layer for layer in range(self.num_layers) if self.experts_of(layer) is not None]

    @property
    def vocabulary(self) -> int:
        return int(self._model.config.vocab_size)

    @property
    def head(self) -> torch.Tensor | SplitVocabulary:
        """lm_head's weight [V, H]."""
        head: torch.Tensor = self._model.lm_head.weight
        return head if self.split is None else self.split.head

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids [B, S] -> embeddings [B, S, H]."""
        if self.split is not None:
            return self.split.embedding.embed(tokens)
        return self._model.model.embed_tokens(tokens)

    def positions(self, hidden: torch.Tensor, places: torch.Tensor | None = None) -> Positions:
        """The rotation of queries and keys at the positions `places` [B, S]; None: 0 to S - 1."""
        if places is None:
            places = torch.arange(hidden.shape[1], device=hidden.device)[None]
        if self._angles is None:
            return self._model.model.rotary_emb(hidden, places)
        return Rotary(self._angles, places, self._interleaved)

    def run_layer(
        self, layer: int, hidden: torch.Tensor, positions: Positions, branches: attention.Branches = None
    ) -> torch.Tensor:
        """One decoder layer, causal within each row; rows may fork (`branches`): [B, S, H] -> [B, S, H]."""
        mask = places = None
        if not self._attends_in_float32:
            mask = self._mask(layer, hidden, branches)
            places, branches = attention.places_of(branches, hidden.shape[1], hidden.device), None
        found = self.layer(layer)(
            hidden,
            attention_mask=mask,
            position_embeddings=positions,
            use_cache=False,
            branches=branches,
            places=places,
        )
        return found[0] if isinstance(found, tuple) else found

    def _mask(self, layer: int, hidden: torch.Tensor, branches: attention.Branches) -> torch.Tensor | None:
        """Mask for Hugging Face's attention [B, 1, S, S]; None: attention is causal without one. With sinks, what is
        added to the scores; else True where a query may see a key."""
        is_eager, length = self._model.config._attn_implementation == "eager", hidden.shape[1]
        window, chunk = self._windows[layer], self._chunks[layer]
        if branches is None and not is_eager and not window and not 0 < chunk < length:
            return None
        seen = attention.visible_keys(branches, length, hidden.device, window, chunk)
        if not is_eager:
            return seen
        return hidden.new_zeros(seen.shape).masked_fill(~seen, torch.finfo(hidden.dtype).min)

    @property
    def computes_tokens_alone(self) -> bool:
        """Whether a token's result, and its gradient, do not depend on which tokens are computed with it."""
        return self._attends_in_float32

    def attention(
        self, layer: int, hidden: torch.Tensor, positions: Positions, branches: attention.Branches = None
    ) -> torch.Tensor:
        """The first half of `run_layer` for some rows: [B, S, H] -> [B, S, H]. Needs `computes_tokens_alone`."""
        module: Any = self.layer(layer)
        mixer = module.linear_attn if hasattr(module, "linear_attn") else module.self_attn
        found = mixer(
            hidden_states=module.input_layernorm(hidden),
            attention_mask=None,
            position_embeddings=positions,
            branches=branches,
        )
        out: torch.Tensor = hidden + (found[0] if isinstance(found, tuple) else found)
        return out

    def feed_forward(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The second half of `run_layer` for some tokens: [1, T, H] -> [1, T, H]."""
        module: Any = self.layer(layer)
        found = getattr(module, self.family.mlp_name)(module.post_attention_layernorm(hidden))
        out: torch.Tensor = hidden + (found[0].view_as(hidden) if isinstance(found, tuple) else found)
        return out

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.model.norm(hidden)

    def layer(self, layer: int) -> nn.Module:
        return self._model.model.layers[layer]

    def experts_of(self, layer: int) -> RoutedExperts | None:
        return self.experts.get(self.family.expert_prefix(layer))

    def submodule(self, name: str) -> nn.Module:
        return self._model.get_submodule(name)

    def replace(self, name: str, module: nn.Module) -> None:
        self._model.set_submodule(name, module)

    def views(self) -> Mapping[str, torch.Tensor]:
        """Every dense parameter and buffer by its Hugging Face name: views of the engine's tensors."""
        return self._views

    def parts(self) -> dict[str, WeightPart]:
        """This rank's part of each dense weight, by its Hugging Face name; with one rank the whole weight."""
        return dict(self._parts)

    @contextlib.contextmanager
    def recomputing(self, layer: int) -> Iterator[None]:
        """In this context the layer runs only for its gradients: its routed experts output zeros.

        Backward recomputes the experts' activations itself and does not need their output.
        """
        module = self.experts_of(layer)
        if module is None:
            yield
            return
        module.needs_output = False
        try:
            yield
        finally:
            module.needs_output = True

    @contextlib.contextmanager
    def padding(self, padding: torch.Tensor | None) -> Iterator[None]:
        """In this context the routed experts skip the rows of [B * S] where `padding` is True; None: no padding."""
        for module in self.experts.values():
            module.padding = padding
        try:
            yield
        finally:
            for module in self.experts.values():
                module.padding = None

    @contextlib.contextmanager
    def routing(self, layer: int, routes: LayerRoutes | None) -> Iterator[None]:
        """In this context the layer's router takes recorded experts; None: it chooses.

        Not on an accelerator: the routers there are Hugging Face's.
        """
        if routes is None:
            yield
            return
        router = self.submodule(self.family.router_module(layer))
        assert isinstance(router, SoftmaxRouter | GroupedRouter)
        router.routes = routes
        try:
            yield
        finally:
            router.routes = None

    def _place_experts(self, config: Mapping[str, Any]) -> None:
        normalises = self.family.softmax_normalises(config)
        for layer in self.family.moe_layers(config):
            prefix = self.family.expert_prefix(layer)
            self.experts[prefix] = RoutedExperts(self._store, layer, self.exchange)
            self.replace(prefix, self.experts[prefix])
            if normalises is not None:
                top_k = self.family.num_experts_per_tok(config)
                num_experts, hidden, _ = self.family.expert_shape(config)
                with torch.device("meta"):
                    router = SoftmaxRouter(
                        num_experts,
                        hidden,
                        top_k,
                        normalises=normalises,
                        has_bias=self.family.has_router_bias(config),
                    )
                self.replace(self.family.router_module(layer), router)

    def _refuse_leftovers(self) -> None:
        tensors = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        left = sorted(name for name, tensor in tensors.items() if tensor.is_meta)
        if left:
            raise CheckpointError(
                f"the training twin has {len(left)} tensors that the family {self.family.name!r} maps to nothing of "
                f"the engine's: {', '.join(left[:5])}"
            )


def _on_meta(family: Family, host: Host) -> Any:
    left_out = ("model_type", "auto_map", "quantization_config")
    ours = {key: value for key, value in host.config.items() if key not in left_out}
    hf_config: PretrainedConfig = AutoConfig.for_model(family.name, **ours)
    implementation = attention.NAME if host.attends_in_float32 else "sdpa"
    if not host.attends_in_float32 and family.attention_vectors(host.config):
        implementation = "eager"  # PyTorch's function has no sinks
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, dtype=host.dtype, attn_implementation=implementation)
    stack = family.decoder_stack(host.config)
    for index, layer in enumerate(model.model.layers):
        if type(getattr(layer, "self_attn", None)).__name__ == llama4.ATTENTION:
            assert stack is not None
            llama4.attend_in_turns(layer.self_attn, stack.layers[index].attention, stack.chunk)
        elif not host.attends_in_float32:
            continue
        elif delta_net.is_hybrid(layer):
            delta_net.compute_natively(layer)
        elif hasattr(hf_config, "kv_lora_rank"):
            attention.absorb(layer.self_attn, _indexing(stack, index), host.exchange)
        else:
            attention.rotate_natively(layer.self_attn, family.window(host.config, index))
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FrozenLinear
        elif host.attends_in_float32 and is_offset_norm(module):
            module.__class__ = FrozenOffsetNorm
            module.variance_epsilon = hf_config.rms_norm_eps
        elif is_rms_norm(module):
            module.__class__ = FrozenRmsNorm
            module.variance_epsilon = hf_config.rms_norm_eps  # for the norms of latents Hugging Face ignores it
        elif is_gated_mlp(module):
            module.__class__ = GatedMlp
        elif type(module).__name__ == llama4.MOE:
            module.__class__ = llama4.WeighedInputMoe
        elif host.attends_in_float32 and (router := grouped_router(module)) is not None:
            module.__class__ = router
    if host.exchange is not None:
        for layer in model.model.layers:
            split_attention(layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn, host.exchange)
            split_mlps(getattr(layer, family.mlp_name), host.exchange)
    return model


def _indexing(stack: DecoderStack | None, layer: int) -> attention.Indexing | None:
    """How a layer of latent attention chooses keys; None: its queries see all."""
    tables = [] if stack is None else [own.attention for own in stack.layers]
    table = tables[layer] if tables else None
    if not isinstance(table, Latent) or not table.seen_keys:
        return None
    indexers = [own.indexer if isinstance(own, Latent) else None for own in tables]
    source = max(index for index in range(layer + 1) if indexers[index] is not None)
    indexer = indexers[source]
    assert indexer is not None
    is_shared = layer + 1 < len(indexers) and indexers[layer + 1] is None
    return attention.Indexing(layer, source, table.seen_keys, is_shared, indexer.interleaved)


def _chunks(family: Family, config: Mapping[str, Any]) -> list[int]:
    """Positions of a chunk, for each layer; 0: the layer's attention is not chunked."""
    stack = family.decoder_stack(config)
    if stack is None:
        return [0] * int(config["num_hidden_layers"])
    return [stack.chunk if getattr(layer.attention, "is_chunked", False) else 0 for layer in stack.layers]


def _share(
    model: nn.Module, sources: list[TensorSource], engine: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Makes each source's tensor of `model` a view of the engine's; returns the views by name."""
    views: dict[str, torch.Tensor] = {}
    for source in sources:
        view = _view(source, engine)
        parent, _, leaf = source.name.rpartition(".")
        module = model.get_submodule(parent)
        if source.is_buffer:
            module.register_buffer(leaf, view)
        else:
            setattr(module, leaf, nn.Parameter(view, requires_grad=False))
        views[source.name] = getattr(module, leaf)
    return views


def bytes_not_shared(model: nn.Module, engine: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the model's weights that lie in none of the engine's storages: what the twin takes in addition to them.

    Rotary tables are not counted: they are computed from the configuration.
    """
    memory = [_addresses(tensor) for tensor in engine.values()]
    weights = [(weight.nbytes, _addresses(weight).start) for weight in model.state_dict().values()]
    return sum(nbytes for nbytes, start in weights if not any(start in of_engine for of_engine in memory))


def _addresses(tensor: torch.Tensor) -> range:
    """The addresses of `tensor`'s storage. A packed matrix has no storage: those of its bytes, which may be a part of
    another matrix's.
    """
    if isinstance(tensor, PackedWeight):
        return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
    storage = tensor.untyped_storage()
    return range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


def dense_views(config: Mapping[str, Any], engine: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The engine's dense weights that a twin shares, by Hugging Face name. Raises CheckpointError as `Twin` does."""
    return {source.name: _view(source, engine) for source in family_for(config).twin_sources(config)}


def _view(source: TensorSource, engine: Mapping[str, torch.Tensor]) -> torch.Tensor:
    whole = _engine_tensor(source.name, source.source, engine).detach()
    view = whole[source.start : source.stop]
    if tuple(view.shape) != source.shape:
        raise CheckpointError(
            f"the training twin's {source.name} has shape {list(source.shape)}, but rows {source.start}:{source.stop} "
            f"of the engine's {source.source} {list(whole.shape)} have {list(view.shape)}"
        )
    if isinstance(view, PackedWeight):  # a slice of one has its memory
        return view
    expected = whole.data_ptr() + source.start * whole.stride(0) * whole.element_size()
    if view.data_ptr() != expected:
        raise CheckpointError(f"the training twin's {source.name} is not a view of the engine's {source.source}")
    return view


def _engine_tensor(what: str, name: str, engine: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if name not in engine:
        raise CheckpointError(
            f"the training twin's {what} should be a view of the engine's {name!r}, which is not there"
            f"{suggestion(name, engine)}"
        )
    return engine[name]
