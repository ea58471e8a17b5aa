"""The keys that are known but not honoured, as data: LLaMA-Factory 0.9.4 to 0.9.6 and transformers 5.

REFUSED: with any other than the listed values, training would differ from what the recipe asks for. WARNED: the key has
no effect on the result; one line explains why. A default value passes silently, since tools write all defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refused:
    """`passing`: the values that mean "off". `reason`: why the key is refused, and the alternative."""

    reason: str
    passing: tuple[Any, ...]


@dataclass(frozen=True)
class Warned:
    """`reason`: why the key has no effect; None: no message. `default` passes silently."""

    reason: str | None
    default: Any = None


def _refused(reason: str, **keys: Any) -> dict[str, Refused]:
    return {key: Refused(reason, (None, default)) for key, default in keys.items()}


def _warned(reason: str | None, **keys: Any) -> dict[str, Warned]:
    return {key: Warned(reason, default) for key, default in keys.items()}


_OTHER_METHOD = "another training method; train with lora alone"
_BASE_IS_SHARED = "would change the base, whose weights serve requests; leave it out"
_AT_SERVE = "the weight format is decided when the server starts: `kt-runtime serve --expert-format`, or the checkpoint"
_DTYPE = "the server computes in its own dtype, bfloat16 or float32 (`kt-runtime serve --dtype`); leave it out"
_FROZEN_ROUTER = "the router is frozen; leave it out"
_REWARD = "belongs to ppo, kto and reward models; this version trains sft and dpo"
_LOSS = "changes the loss in a way that this version does not compute; leave it out"
_EXPORT = "`kt-runtime export` writes plain weights to export_dir; quantize or upload afterwards"
_GPU_EXPERTS = "extra experts on the GPU can't be served; leave it out, lora_target: all adapts every routed expert"
_HUB = "nothing is uploaded; upload output_dir afterwards"

REFUSED: Mapping[str, Refused] = {
    **_refused(_FROZEN_ROUTER, moe_aux_loss_coef=0),
    **_refused(_AT_SERVE, quantization_bit=None, quantization_device_map=None),
    **_refused(_DTYPE, fp16=False, fp16_full_eval=False),
    **_refused(
        _BASE_IS_SHARED,
        resize_vocab=False,
        add_tokens=None,
        add_special_tokens=None,
        new_special_tokens_config=None,
        rope_scaling=None,
        shift_attn=False,
        mixture_of_depths=None,
        train_from_scratch=False,
        freeze_extra_modules=None,
    ),
    **_refused("text would be split differently from how it is served; leave it out", split_special_tokens=False),
    **_refused("SGLang has no place for fully trained modules; leave it out", additional_target=None),
    **_refused("SGLang does not serve DoRA; leave it out, or say use_rslora", use_dora=False),
    **_refused("PiSSA rewrites base weights, which are shared with serving", pissa_init=False, pissa_convert=False),
    **_refused(
        _OTHER_METHOD,
        **dict.fromkeys(["use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon", "use_llama_pro"], False),
        **dict.fromkeys(["use_mca", "use_hyper_parallel", "use_megatron_bridge"], False),
    ),
    **_refused(
        _LOSS,
        use_dft_loss=False,
        use_asft_loss=False,
        use_eaft_loss=False,
        pref_bco_weight=0,
        ld_alpha=None,
        label_smoothing_factor=0,
        neftune_noise_alpha=0,
    ),
    **_refused(
        "the reference is the resident model; name a second adapter with ref_model_adapters",
        ref_model_quantization_bit=None,
    ),
    **_refused(_REWARD, reward_model=None, reward_model_adapters=None, reward_model_quantization_bit=None),
    **_refused(_REWARD, reward_model_type="lora", kto_chosen_weight=1, kto_rejected_weight=1),
    **_refused(_REWARD, ppo_buffer_size=1, ppo_epochs=4, ppo_score_norm=False, ppo_target=6, ppo_whiten_rewards=False),
    **_refused("rows are read in bounded memory anyway; leave it out", streaming=False),
    **_refused("rows are rendered anew for each run, in seconds; leave it out", tokenized_path=None),
    **_refused(_HUB, push_to_hub=False),
    **_refused("write one of adamw's settings as a key of its own", optim_args=None, optim_target_modules=None),
    **_refused("every row is trained on; leave it out", dataloader_drop_last=False),
    **_refused(
        "rows are taken in shuffled order; say disable_shuffling: true for the data's", train_sampling_strategy="random"
    ),
    **_refused("beams are not searched; leave it out", num_beams=1, eval_num_beams=1, generation_num_beams=1),
    **_refused("SGLang has no length penalty; leave it out", length_penalty=1),
    **_refused("evaluation begins with the first period; leave it out", eval_delay=0),
    **_refused("the batch size is yours to set; leave it out", auto_find_batch_size=False),
    **_refused("a resumed run goes on where it stopped in the data; leave it out", ignore_data_skip=False),
    **_refused(_EXPORT, export_quantization_bit=None, export_quantization_dataset=None, export_hub_model_id=None),
    **_refused(_EXPORT, export_legacy_format=False, export_hf_on_finish=False),
    **_refused(_GPU_EXPERTS, kt_use_lora_experts=False, kt_lora_expert_num=None, kt_lora_expert_intermediate_size=None),
}

_LOADED = "the resident model is already loaded"
_DEVICES = "placement is the server's; the result is the same"
_ENGINE = "another engine's setting; SGLang answers"
_IMAGES = "text models only"
_SECRET = "nothing is downloaded or uploaded"
_KT_ENGINE = "the old engine's setting; SGLang answers"
_OFF = None  # settings of methods that are refused when they are on

WARNED: Mapping[str, Warned] = {
    **_warned(
        _LOADED,
        trust_remote_code=False,
        cache_dir=None,
        model_revision="main",
        use_fast_tokenizer=True,
        low_cpu_mem_usage=True,
        flash_attn="auto",
        infer_dtype="auto",
        offload_folder="offload",
        use_kv_cache=True,
        print_param_status=False,
        use_unsloth=False,
        use_unsloth_gc=False,
        enable_liger_kernel=False,
        use_liger_kernel=False,
        liger_kernel_config=None,
        use_cache=False,
        use_v1_kernels=False,
        use_reentrant_gc=True,
        upcast_layernorm=False,
        pure_bf16=False,
        torch_compile=False,
        torch_compile_backend=None,
        torch_compile_mode=None,
        gradient_checkpointing_kwargs=None,
        torch_empty_cache_steps=None,
    ),
    **_warned("the server's dtype holds", bf16=False, bf16_full_eval=False, tf32=None),
    **_warned(_SECRET, hf_hub_token=None, ms_hub_token=None, om_hub_token=None, hub_token=None),
    **_warned(
        _SECRET,
        hub_model_id=None,
        hub_strategy="every_save",
        hub_private_repo=None,
        hub_always_push=False,
        hub_revision=None,
    ),
    **_warned(
        "swanlab reads its own settings from its environment variables",
        swanlab_api_key=None,
        swanlab_project="llamafactory",
        swanlab_workspace=None,
        swanlab_run_name=None,
        swanlab_mode="cloud",
        swanlab_logdir=None,
        swanlab_lark_webhook_url=None,
        swanlab_lark_secret=None,
    ),
    **_warned(
        "the tracker reads its own settings from its environment variables",
        project="huggingface",
        trackio_space_id=None,
        trackio_bucket_id=None,
        trackio_static_space_id=None,
    ),
    **_warned(
        _ENGINE,
        vllm_maxlen=4096,
        vllm_gpu_util=0.7,
        vllm_enforce_eager=False,
        vllm_max_lora_rank=32,
        vllm_config=None,
        sglang_maxlen=4096,
        sglang_mem_fraction=0.7,
        sglang_tp_size=-1,
        sglang_config=None,
        sglang_lora_backend="triton",
    ),
    **_warned(
        _IMAGES,
        media_dir=None,
        image_max_pixels=589824,
        image_min_pixels=1024,
        image_do_pan_and_scan=False,
        crop_to_patches=False,
        video_max_pixels=65536,
        video_min_pixels=256,
        video_fps=2.0,
        video_maxlen=128,
        use_audio_in_video=False,
        audio_sampling_rate=16000,
        freeze_vision_tower=True,
        freeze_multi_modal_projector=True,
        freeze_language_model=False,
    ),
    **_warned(
        _DEVICES,
        local_rank=-1,
        deepspeed=None,
        fsdp=None,
        fsdp_config=None,
        ray_num_workers=1,
        ray_init_kwargs=None,
        master_addr=None,
        master_port=None,
        use_cpu=False,
        accelerator_config=None,
        parallelism_config=None,
        ddp_backend=None,
        save_on_each_node=False,
        ddp_find_unused_parameters=None,
        ddp_bucket_cap_mb=None,
        ddp_broadcast_buffers=None,
        ddp_static_graph=None,
        average_tokens_across_devices=True,
        log_on_each_node=True,
        fp8=False,
        fp8_backend="auto",
        fp8_enable_fsdp_float8_all_gather=False,
        export_device="cpu",
    ),
    **_warned(
        "there is no profiler here",
        enable_torch_profiler=False,
        profiler_output_dir=None,
        profiler_wait_steps=1,
        profiler_warmup_steps=1,
        profiler_active_steps=1,
        profiler_repeat=1,
        profile_modules=None,
        profiler_record_shapes=True,
        profiler_profile_memory=True,
        profiler_with_stack=True,
    ),
    **_warned(
        _KT_ENGINE, mode="normal", kt_maxlen=4096, kt_use_cuda_graph=True, kt_mode="normal", kt_force_think=False
    ),
    **_warned("the loss is computed in float32 anyway", upcast_lmhead_output=False),
    **_warned("padding is never trained on", ignore_pad_token_for_loss=True),
    **_warned("the model's own chat template renders tools", tool_format=None),
    **_warned("a repeated run is the same on one machine anyway", full_determinism=False),
    **_warned("evaluation keeps figures only", eval_accumulation_steps=None, prediction_loss_only=False),
    **_warned("evaluation keeps figures only", include_for_metrics=None, batch_eval_metrics=False),
    **_warned("the answer's length is max_new_tokens", generation_max_length=None, generation_config=None),
    **_warned(
        "log lines go to the terminal and to trainer_log.jsonl", log_level="passive", log_level_replica="warning"
    ),
    **_warned("the bar is shown on terminals only", disable_tqdm=None),
    # No message: caches, processes and files that do not exist here, and settings of methods that are off.
    **_warned(
        None,
        overwrite_cache=False,
        preprocessing_batch_size=1000,
        preprocessing_num_workers=None,
        dataloader_num_workers=0,
        dataloader_pin_memory=True,
        dataloader_persistent_workers=False,
        dataloader_prefetch_factor=None,
        dataloader_in_order=True,
        dataloader_multiprocessing_context=None,
        data_shared_file_system=False,
        buffer_size=16384,
        ddp_timeout=1800,
        remove_unused_columns=True,
        label_names=None,
        length_column_name="length",
        sortish_sampler=False,
        debug="",
        skip_memory_metrics=True,
        logging_nan_inf_filter=True,
        include_num_input_tokens_seen="no",
        eval_do_concat_batches=True,
        eval_use_gather_object=False,
        enable_jit_checkpoint=False,
        restore_callback_states_from_checkpoint=False,
    ),
    **_warned(
        _OFF,
        quantization_method="bnb",
        quantization_type="nf4",
        double_quantization=True,
        init_special_tokens="noise_init",
        pissa_iter=16,
        loraplus_lr_embedding=1e-6,
        freeze_trainable_layers=2,
        freeze_trainable_modules="all",
        module_dropout=0.0,
        oft_rank=0,
        oft_block_size=32,
        oft_target="all",
        galore_target="all",
        galore_rank=16,
        galore_update_interval=200,
        galore_scale=2.0,
        galore_proj_type="std",
        galore_layerwise=False,
        apollo_target="all",
        apollo_rank=16,
        apollo_update_interval=200,
        apollo_scale=32.0,
        apollo_proj="random",
        apollo_proj_type="std",
        apollo_scale_type="channel",
        apollo_layerwise=False,
        apollo_scale_front=False,
        badam_mode="layer",
        badam_start_block=None,
        badam_switch_mode="ascending",
        badam_switch_interval=50,
        badam_update_ratio=0.05,
        badam_mask_mode="adjacent",
        badam_verbose=0,
        hyper_parallel_args=None,
        hyper_parallel_cp_size=1,
        asft_alpha=0.1,
        eaft_alpha=1.0,
        export_quantization_nsamples=128,
        export_quantization_maxlen=1024,
    ),
}
