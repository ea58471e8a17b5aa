"""The native step: one call into C++ computes the decoder stack of a batch on a CPU (csrc/step/program.h).

Symbols (SGLang 0.5.23): after `ModelRunner.init_attention_backends` weights, LoRA layers and KV pool exist; the step is
built over them. The forward methods of `DECODERS` then run the step for every batch that qualifies
(`models.deepseek_v2` is DeepSeek-V2, DeepSeek-V3 and Kimi-K2; `models.qwen3_5` has the stack of Qwen3.5's text model).
`LogitsProcessor.forward` and `ModelRunner.sample` are
timed. The other symbols are only read. Reason: SGLang's modules make about a hundred calls of PyTorch for a layer. For
a decode step the calls and the Python between them take longer than the arithmetic.

SGLang's modules still compute families without a table (`Family.decoder_stack`), batches with embeddings as input, and
captured states of single layers. Both ways give the same bits, because the step calls the same kernels in the same
order. The log states each reason once, /kt/status lists them (`state`, `exceptions`). /kt/status also shows how long
the step, the head and sampling took for decoding requests (`decoded`), and whether training is equal to the bit
(`not_exact`).
With several ranks each runs the step on its share, and the steps exchange what they need (`ranks.group`).
`lora.step` gives the step the LoRA pool and the adapters of a batch, `delta.step` the states of Gated DeltaNet layers.

A batch with an id, a position or a KV slot out of range raises InvalidValueError before anything is written;
`faults.batches` then ends the request at fault. A token with NaN or Inf is noted for `faults.finite_rows`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kt_runtime.beside import BATCHES
from kt_runtime.errors import InvalidValueError, KtError, NumericsError
from kt_runtime.experts.machine import pool_processor
from kt_runtime.experts.step import NO_LORA, Step, StepShare
from kt_runtime.families import family_for
from kt_runtime.families.stack import DecoderStack, GatedDelta
from kt_runtime.ops.step import build_step
from kt_runtime.priority import OwnProcessor
from kt_runtime.resident.config import ResidentSettings
from kt_runtime.resident.host import Decoded
from kt_runtime.sglang_patch.cache.namespace import named_tensors
from kt_runtime.sglang_patch.cpu import absorbed, routes
from kt_runtime.sglang_patch.delta import step as delta_step
from kt_runtime.sglang_patch.faults import finite_rows
from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.lora import step as lora_step
from kt_runtime.sglang_patch.options import ATTENTION_BACKEND
from kt_runtime.sglang_patch.ranks import group
from kt_runtime.sglang_patch.store import expert_store, keeps_experts_in_store
from kt_runtime.wire.replies import STEP_RUNNING

logger = logging.getLogger(__name__)

BUILT_AFTER = "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends"
SAMPLE = "sglang.srt.model_executor.model_runner.ModelRunner.sample"
HEAD = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"
DECODERS = (
    "sglang.srt.models.qwen3_moe.Qwen3MoeModel.forward",
    "sglang.srt.models.deepseek_v2.DeepseekV2Model.forward",
    "sglang.srt.models.mixtral.MixtralModel.forward",
    "sglang.srt.models.olmoe.OlmoeModel.forward",
    "sglang.srt.models.glm4_moe.Glm4MoeModel.forward",
    "sglang.srt.models.glm4_moe_lite.Glm4MoeLiteModel.forward",
    "sglang.srt.models.minimax_m2.MiniMaxM2Model.forward",
    "sglang.srt.models.gpt_oss.GptOssModel.forward",
    "sglang.srt.models.llama4.Llama4Model.forward",
    "sglang.srt.models.qwen3_next.Qwen3NextModel.forward",
    "sglang.srt.models.qwen3_5.Qwen3_5ForCausalLM.forward",
)
SYMBOLS = (
    *(BUILT_AFTER, SAMPLE, HEAD, *DECODERS),
    "sglang.srt.layers.logits_processor.LogitsProcessor.use_fp32_lm_head",
    "sglang.srt.layers.vocab_parallel_embedding.VocabParallelEmbedding",
    "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native",
    "sglang.srt.layers.rotary_embedding.mrope.MRotaryEmbedding.forward_native",
    "sglang.srt.layers.rotary_embedding.rope_variant.DeepseekScalingRotaryEmbedding.forward_native",
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool",
    "sglang.srt.model_executor.forward_batch_info.ForwardMode",
    "sglang.srt.runtime_context.get_exec",
    "sglang.srt.runtime_context.get_observability",
    "sglang.srt.runtime_context.get_parallel",
    "sglang.srt.state_capturer.routed_experts.get_global_experts_capturer",
)

_program: Program | None = None  # of the process's only model
_reason = "no model has been loaded"  # why there is no program
_exceptions: list[str] = []  # why SGLang's modules computed a batch although there is a program
_decoded = Decoded()  # by all programs of the process


def install(hooks: Hooks) -> None:
    if hooks.on_cpu:
        hooks.after(BUILT_AFTER, _build)
        for decoder in DECODERS:
            hooks.around(decoder, forward)
        hooks.around(SAMPLE, _sample)
        hooks.around(HEAD, _head)


def state() -> str:
    """`STEP_RUNNING`, or why SGLang's modules compute every batch."""
    return STEP_RUNNING if _program is not None else _reason


def exceptions() -> list[str]:
    """Why SGLang's modules have computed some batches although the step runs; each reason once."""
    return list(_exceptions)


def not_exact() -> str:
    """Why training's log-probabilities may differ from served ones; empty if they are equal to the bit."""
    if _program is None:
        return f"the native step does not compute the model: {_reason}"
    if _program.no_adapters:
        return f"the native step does not compute batches with adapters: {_program.no_adapters}"
    if _program.runner.model.logits_processor.use_fp32_lm_head and _program.runner.dtype != torch.float32:
        return f"serving multiplies the head in float32, training in {_program.runner.dtype}".replace("torch.", "")
    if _exceptions:
        return f"the native step has left a batch to SGLang's modules: {_exceptions[0]}"
    return ""


def decoded() -> Decoded:
    """Counts of decoded tokens since the start, or since `forget`."""
    return replace(_decoded)


def forget() -> None:
    """Drops the step and what it keeps alive: parameters, KV pool and experts."""
    global _program, _reason, _decoded
    _program, _reason, _decoded = None, "no model has been loaded", Decoded()
    _exceptions.clear()


class Program:
    """The step of one model. `model`: the decoder stack of SGLang's `runner`. `tensors`: those that the step reads.

    `no_adapters`: why the step can't run batches with adapters; empty if it can.
    """

    def __init__(self, runner: Any, step: Step, tensors: Sequence[torch.Tensor]) -> None:
        self.runner, self.model = runner, runner.model.model
        self.no_adapters = lora_step.why_not(runner.lora_manager)
        self._step, self._tensors = step, tensors
        self._built_over, self._lora_built_over = self._addresses(), self._lora_addresses()
        self._processor = OwnProcessor(pool_processor())

    def has_moved(self, adapted: bool) -> bool:
        """Whether the engine has given a parameter or the KV pool other memory since the step was built.

        `adapted`: or the LoRA pool, which only batches with adapters read.
        """
        return self._addresses() != self._built_over or (adapted and self._lora_addresses() != self._lora_built_over)

    def _addresses(self) -> list[int]:
        buffers = [tensor for layer in layer_buffers(self.runner) for tensor in layer]
        return [tensor.data_ptr() for tensor in (*self._tensors, *buffers)]

    def _lora_addresses(self) -> list[int]:
        return [] if self.no_adapters else lora_step.addresses(self.runner.lora_manager)

    def run(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        """Normalised hidden states [T, H]. Writes the new keys and values to the pool."""
        from sglang.srt.model_executor.forward_context import get_attn_backend

        for layer in delta_step.attending_layers(self.model):
            self.runner.token_to_kv_pool.get_key_buffer(layer)  # waits for pages that the host tier still copies
        backend = get_attn_backend()
        sequences = delta_step.attending_backend(backend).forward_metadata
        states = delta_step.state_slots(backend)
        slots = batch.out_cache_loc.long()
        started = time.perf_counter()
        lora = lora_step.batch_lora(self.runner.lora_manager) if _is_adapted(batch) else NO_LORA
        with self._processor.batch(has_work_beside=BATCHES.has_work_beside()):
            hidden, refused = self._step.run(
                input_ids.long(), positions.long(), slots, sequences, lora, routes.rows(), states
            )
        if batch.forward_mode.is_decode():
            _decoded.step_batches += 1
            _decoded.step_tokens += len(slots)
            _decoded.step_seconds += time.perf_counter() - started
        if refused:
            _note(refused, len(hidden))
        return hidden


def layer_buffers(runner: Any) -> list[tuple[torch.Tensor, ...]]:
    """What each layer keeps of tokens (`kv_buffers`), or of sequences."""
    return delta_step.kept_by_layers(runner.model.model, kv_buffers(runner.token_to_kv_pool), runner.req_to_token_pool)


def kv_buffers(pool: Any) -> list[tuple[torch.Tensor, ...]]:
    """The KV buffers of each layer with keys: keys and values, or latents with their rotary keys (latent attention)."""
    pool = delta_step.attending_pool(pool)
    if hasattr(pool, "kv_buffer"):
        return [(buffer,) for buffer in pool.kv_buffer]
    return list(zip(pool.k_buffer, pool.v_buffer, strict=True))


def forward(
    original: Any,
    model: Any,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    input_embeds: torch.Tensor | None = None,
    pp_proxy_tensors: Any = None,
) -> Any:
    """OLMoE's and Qwen3-Next's have no `pp_proxy_tensors`. Background work on adapters pauses meanwhile."""
    mode = forward_batch.forward_mode
    with BATCHES.computing(is_prompt=mode.is_extend() and not mode.is_mixed(), is_step=mode.is_decode()):
        return _forward(original, model, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)


def _forward(
    original: Any,
    model: Any,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    input_embeds: torch.Tensor | None,
    pp_proxy_tensors: Any,
) -> Any:
    # Qwen3.5's are [3, T], of time, height and width: those of a text are equal.
    places = positions[0] if positions.dim() == 2 else positions
    routes.begin(input_ids, places)
    program = _program_for(model, forward_batch)
    if program is not None:
        unfit = _unfit(program, input_ids, forward_batch, input_embeds, pp_proxy_tensors)
        if unfit is None:
            return program.run(input_ids, places, forward_batch)
        if unfit not in _exceptions:
            _exceptions.append(unfit)
            logger.info("SGLang's modules compute a batch, not the native step, because %s (logged once)", unfit)
    proxies = () if pp_proxy_tensors is None else (pp_proxy_tensors,)
    return original(model, input_ids, positions, forward_batch, input_embeds, *proxies)


def _head(original: Any, processor: Any, input_ids: Any, hidden: Any, head: Any, batch: Any, *rest: Any) -> Any:
    started = time.perf_counter()
    logits = original(processor, input_ids, hidden, head, batch, *rest)
    if batch.forward_mode.is_decode():
        _decoded.head_seconds += time.perf_counter() - started
    return logits


def _sample(original: Any, runner: Any, logits_output: Any, forward_batch: Any) -> Any:
    started = time.perf_counter()
    tokens = original(runner, logits_output, forward_batch)
    if forward_batch.forward_mode.is_decode():
        _decoded.sampling_seconds += time.perf_counter() - started
    return tokens


def _program_for(model: Any, batch: Any) -> Program | None:
    if _program is None or _program.model is not model:
        return None
    # Reading every tensor's address takes 0.1 ms. A running server moves none: the routes that would are refused.
    if not batch.forward_mode.is_decode() and _program.has_moved(_is_adapted(batch)):
        logger.info("parameters, the KV pool or the LoRA pool have other memory: the native step is built again")
        _build(None, _program.runner)
    return _program


def _is_adapted(batch: Any) -> bool:
    return any(lora_id is not None for lora_id in batch.lora_ids or ())


def _unfit(program: Program, input_ids: torch.Tensor, batch: Any, input_embeds: Any, proxies: Any) -> str | None:
    """Why the step can't run this batch; None if it can."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    mode = batch.forward_mode
    if mode not in (ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED):
        return f"its mode is {mode.name}"
    if program.no_adapters and _is_adapted(batch):
        return f"it has an adapter, and {program.no_adapters}"
    if input_embeds is not None or batch.replace_embeds is not None:
        return "its input has embeddings"
    if proxies is not None:
        return "it continues another rank's layers"
    if getattr(program.model, "layers_to_capture", None):
        return "states of single layers are captured"
    if get_global_experts_capturer() is not None:
        return "the chosen experts are captured"
    if batch.can_run_tbo:
        return "it is computed in two halves"
    if len(input_ids) != (len(batch.seq_lens) if mode.is_decode() else sum(map(int, batch.extend_seq_lens_cpu))):
        return "it is padded"
    return None


def _note(refused: list[int], tokens: int) -> None:
    """Notes rows that the experts refused, as `moe.experts_forward` does."""
    notes = finite_rows.present()
    if notes is None:
        raise NumericsError(f"activations of token {refused[0]} are NaN or Inf")
    bad = torch.zeros(tokens, dtype=torch.bool)
    bad[refused] = True
    notes.note_rows(bad)


def _build(result: None, runner: Any, *args: Any, **kwargs: Any) -> None:
    global _program, _reason
    if runner.is_draft_worker:  # of speculative decoding; its model computes with SGLang's modules
        return
    _program, _reason = None, "the step could not be built; the log has the reason"
    try:
        _reason = _why_not(runner)
        if not _reason:
            _program = _program_of(runner)
    except KtError as error:
        _reason = str(error)
    if _program is not None:
        logger.info("the native step computes the decoder stack")
    else:
        logger.info("SGLang's modules compute the decoder stack, not the native step: %s", _reason)


def _why_not(runner: Any) -> str:
    """Why the model can't have a step; empty if it can."""
    from sglang.srt.runtime_context import get_exec, get_observability, get_parallel

    settings = ResidentSettings.from_environment()
    if settings is not None and not settings.step:
        return "--no-step"
    if get_parallel().pp_size > 1:
        return "the model's layers are split over several ranks"
    config = runner.model_config.hf_config.to_dict()
    if not keeps_experts_in_store(runner.model_config.hf_config):
        return f"{config.get('model_type')!r} is not one of kt-runtime's model families"
    family = family_for(config)
    stack = family.decoder_stack(config)
    if stack is None:
        return f"the family {family.name} has no table of its decoder stack"
    for backend in (runner.prefill_attention_backend_str, runner.decode_attention_backend_str):
        if backend != ATTENTION_BACKEND:
            return f"the attention backend is {backend}"
    if not hasattr(delta_step.attending_backend(runner.attn_backend), "forward_metadata"):
        return f"the attention backend is wrapped in {type(runner.attn_backend).__name__}"
    if get_exec().moe.expert_distribution_recorder_mode is not None:
        return "the distribution of experts is recorded"
    if get_observability().forward_hooks:  # registered after the step is built
        return "forward hooks are asked for"
    return _why_not_pool(runner) or _why_not_modules(runner.model, stack.interleaved, runner.dtype)


def _why_not_pool(runner: Any) -> str:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    pool = delta_step.attending_pool(runner.token_to_kv_pool)
    if type(pool) is MHATokenToKVPool:
        is_plain = pool.kv_cache_layout == "nhd" and not pool.is_quantized_kv_cache
    else:
        is_plain = (type(pool) is MLATokenToKVPool or hasattr(pool, "index_keys")) and not pool.use_dsa
    if is_plain and pool.store_dtype == runner.dtype:
        return ""
    return f"the KV pool is a {type(pool).__name__} of {pool.dtype}, the model {runner.dtype}"


def _why_not_modules(model: Any, is_interleaved: bool, dtype: torch.dtype) -> str:
    rotaries = {attention.rotary_emb for attention in delta_step.attending_layers(model.model).values()} - {None}
    for rotary in rotaries:
        if not _is_plain(rotary, dtype) or rotary.is_neox_style == is_interleaved:
            return f"the rotary embedding is {type(rotary).__name__}"
    if len(rotaries) > 1:
        return f"the layers have {len(rotaries)} rotary embeddings"
    for name, module in model.named_modules():
        if getattr(module, "use_intel_amx_backend", False):
            return f"the weights of {name} are packed"
        if getattr(module, "fp32_residual", False):
            return f"{name} has a residual in float32"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name} has a forward hook"
    return ""


def _is_plain(rotary: Any, dtype: torch.dtype) -> bool:
    """Whether it multiplies and rounds as the step, in `dtype`. SGLang writes this in three ways."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.mrope import MRotaryEmbedding
    from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding

    kind = type(rotary)
    if not issubclass(kind, RotaryEmbedding) or kind.forward is not RotaryEmbedding.forward:
        return False
    if kind.forward_native is DeepseekScalingRotaryEmbedding.forward_native:  # does not convert the table
        return bool(rotary.cos_sin_cache.dtype == dtype)
    return kind.forward_native in (RotaryEmbedding.forward_native, MRotaryEmbedding.forward_native)


def _program_of(runner: Any) -> Program:
    config = runner.model_config.hf_config.to_dict()
    stack = family_for(config).decoder_stack(config)
    assert stack is not None
    attention = next(iter(delta_step.attending_layers(runner.model.model).values()))
    halves = absorbed.weights(runner.model)
    step = build_step(
        stack,
        {**named_tensors(runner.model), **halves},
        expert_store(),
        layer_buffers(runner),
        attention.rotary_emb.cos_sin_cache.to(runner.dtype),
        attention.scaling,
        config["vocab_size"],
        lora_step.lora_pool(runner.lora_manager, delta_layers(stack)),
        _share(runner.model.model.embed_tokens),
    )
    return Program(runner, step, [*runner.model.parameters(), *halves.values()])


def _share(embedding: Any) -> StepShare | None:
    """None with one rank. `embedding`: SGLang's, which gives each rank as many ids, the last one perhaps fewer."""
    exchange = group.exchange()
    if exchange is None:
        return None
    ids = int(embedding.num_embeddings_per_partition)
    rank, first = exchange.share.rank, embedding.shard_indices.org_vocab_start_index
    if embedding.num_added_embeddings or first not in (rank * ids, embedding.org_vocab_size):
        raise InvalidValueError(f"the embedding of rank {rank} begins with id {first}; expected {rank * ids}")
    return StepShare(exchange.native, rank, exchange.share.num_ranks, ids)


def delta_layers(stack: DecoderStack) -> set[int]:
    return {index for index, layer in enumerate(stack.layers) if isinstance(layer.attention, GatedDelta)}
