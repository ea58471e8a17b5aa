"""Every key of the specification has its class, and behaves as its class says; the documentation is the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kt_runtime.documents import Values, plain, read_file
from kt_runtime.errors import InvalidValueError
from kt_runtime.train.recipe import Recipe, checks, kt_config, read_recipe
from kt_runtime.train.recipe.aliases import APPLY
from kt_runtime.train.recipe.fields import DEFAULTS, HONOURED, NULLABLE
from kt_runtime.train.recipe.others import REFUSED, TABLE, WARNED
from kt_runtime.train.recipe.table import KNOWN, markdown, rows

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = ROOT / "docs" / "recipes.md"
KEYS = ROOT / "configs" / "recipe_keys.yaml"
GOOD = "model_name_or_path: m\ndataset: identity\noutput_dir: out\n"

# The keys of LLaMA-Factory 0.9.4 to 0.9.6 by class, as the project's reference classes them (its "H or R" decided).
SPECIFIED = {
    "honoured": """model_name_or_path adapter_name_or_path disable_gradient_checkpointing stage do_train do_eval
        do_predict finetuning_type lora_rank lora_alpha lora_dropout lora_target use_rslora loraplus_lr_ratio
        compute_accuracy disable_shuffling early_stopping_steps include_effective_tokens_per_second pref_beta pref_loss
        pref_ftx dpo_label_smoothing simpo_gamma ref_model_adapters dataset eval_dataset dataset_dir template cutoff_len
        train_on_prompt mask_history packing mix_strategy interleave_probs max_samples val_size eval_on_each_dataset
        default_system enable_thinking preserve_thinking reasoning_effort output_dir logging_steps logging_first_step
        logging_strategy save_steps save_strategy save_total_limit save_only_model overwrite_output_dir plot_loss
        report_to run_name per_device_train_batch_size gradient_accumulation_steps per_device_eval_batch_size
        eval_strategy eval_steps eval_on_start learning_rate num_train_epochs max_steps lr_scheduler_type
        lr_scheduler_kwargs warmup_ratio warmup_steps weight_decay max_grad_norm adam_beta1 adam_beta2 adam_epsilon seed
        data_seed optim resume_from_checkpoint load_best_model_at_end metric_for_best_model greater_is_better do_sample
        temperature top_p top_k max_new_tokens max_length repetition_penalty skip_special_tokens export_dir
        export_size predict_with_generate publish publish_every_steps publish_take_over
        ref_logprobs reward reward_pattern num_generations rollout_batch_size steps_per_rollout async_rollouts
        advantage_estimator policy_loss clip_low clip_high dro_beta kl_coef""",
    "alias": """adapter_folder infer_backend neat_packing ref_model use_swanlab gradient_checkpointing use_kt
        kt_optimize_rule cpu_infer chunk_size kt_weight_path kt_non_expert_weight_path kt_expert_checkpoint_path
        kt_cpu_activation kt_config create_new_adapter""",
    "refused": """moe_aux_loss_coef quantization_bit quantization_device_map resize_vocab add_tokens add_special_tokens
        new_special_tokens_config rope_scaling shift_attn mixture_of_depths train_from_scratch additional_target
        use_dora pissa_init pissa_convert use_galore use_apollo use_badam use_adam_mini use_muon use_llama_pro use_mca
        use_hyper_parallel use_megatron_bridge use_dft_loss use_asft_loss use_eaft_loss pref_bco_weight ld_alpha
        ref_model_quantization_bit reward_model reward_model_adapters ppo_epochs kto_chosen_weight streaming
        tokenized_path push_to_hub fp16 label_smoothing_factor neftune_noise_alpha num_beams length_penalty
        export_quantization_bit export_hub_model_id kt_use_lora_experts kt_lora_expert_num
        kt_lora_expert_intermediate_size""",
    "warned": """trust_remote_code cache_dir model_revision use_fast_tokenizer low_cpu_mem_usage flash_attn infer_dtype
        offload_folder use_kv_cache print_param_status use_unsloth use_unsloth_gc enable_liger_kernel use_v1_kernels
        use_reentrant_gc upcast_layernorm hf_hub_token ms_hub_token om_hub_token swanlab_api_key vllm_maxlen
        vllm_config sglang_maxlen sglang_config image_max_pixels video_fps audio_sampling_rate freeze_vision_tower
        freeze_multi_modal_projector pure_bf16 media_dir buffer_size overwrite_cache preprocessing_batch_size
        preprocessing_num_workers dataloader_num_workers data_shared_file_system ignore_pad_token_for_loss bf16 tf32
        ddp_timeout ddp_backend local_rank deepspeed fsdp fsdp_config ray_num_workers gradient_checkpointing_kwargs fp8
        enable_torch_profiler profiler_output_dir profile_modules mode kt_maxlen kt_use_cuda_graph kt_mode
        kt_force_think swanlab_project hub_model_id pissa_iter loraplus_lr_embedding galore_rank oft_rank
        freeze_trainable_layers quantization_method double_quantization""",
}

# Values where the type alone says too little: as written, and what the recipe then holds where that is not the same.
GOOD_VALUES: dict[str, Any] = {
    "adapter_name_or_path": (".", Path(".")),
    "stage": "dpo",
    "do_train": (True, True),
    "finetuning_type": ("lora", "lora"),
    "lora_target": ("attention,experts", ("attention", "experts")),
    "pref_loss": "simpo",
    "dataset": ("a, b", ("a", "b")),
    "eval_dataset": (["a", "b"], ("a", "b")),
    "template": "deepseek3",
    "mix_strategy": "interleave_once",
    "logging_strategy": "epoch",
    "save_strategy": "epoch",
    "report_to": (["none"], ()),
    "lr_scheduler_type": "constant_with_warmup",
    "optim": "adamw_torch",
    "resume_from_checkpoint": (True, True),
    "reward": ("rewards.py:judge", "rewards.py:judge"),
    "advantage_estimator": "rloo",
    "policy_loss": "gspo",
    "routing_replay": "rollout",
    "clip_high": 1.5,
}
TOGETHER = [
    *("do_eval", "do_predict", "eval_on_each_dataset", "eval_strategy", "eval_on_start", "load_best_model_at_end"),
    *("early_stopping_steps", "interleave_probs", "lr_scheduler_kwargs", "publish_every_steps", "ref_model_adapters"),
    "ref_logprobs",
]


def read(tmp_path: Path, **keys: Any) -> tuple[Recipe, list[str]]:
    """Written as YAML by hand, so that the value is what a user would type."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        GOOD.replace("dataset: identity\n", "" if "dataset" in keys else "dataset: identity\n")
        .replace("output_dir: out\n", "" if "output_dir" in keys else "output_dir: out\n")
        .replace("model_name_or_path: m\n", "" if "model_name_or_path" in keys else "model_name_or_path: m\n")
        + "".join(f"{key}: {_written(value)}\n" for key, value in keys.items())
    )
    return read_recipe(path)


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_written(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def test_every_specified_key_has_its_class() -> None:
    classes = {row.key: row.kind for row in rows()}
    specified = {key: kind for kind, keys in SPECIFIED.items() for key in keys.split()}
    assert {key: classes.get(key) for key in specified} == specified


def test_no_key_has_two_classes() -> None:
    listed = [key for group in (*TABLE.refused, *TABLE.warned) for key in group.keys]
    assert sorted(KNOWN) == sorted({*KNOWN}) == sorted([*HONOURED, *TABLE.aliases, *listed])


def test_the_table_of_keys_means_the_same_to_every_yaml_reader() -> None:
    """A name that stands twice in a mapping is a problem for documents.Values alone; `off` is one to YAML 1.1 alone."""
    problems: list[str] = []
    root = read_file(KEYS, "table")
    assert isinstance(root, yaml.MappingNode)
    of_core_schema = plain(tuple(Values(str(KEYS), problems).entries(root)))
    of_yaml_1_1 = yaml.safe_load(KEYS.read_text())
    assert not problems
    assert repr(of_core_schema) == repr(of_yaml_1_1), "0, 0.0 and false are three values"


def test_every_alias_is_applied() -> None:
    assert list(APPLY) == list(TABLE.aliases)


def test_an_honoured_key_reaches_the_recipe(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for key in sorted(set(HONOURED) - set(TOGETHER)):
        with subtests.test(key=key):
            given = GOOD_VALUES.get(key, _other(key))
            written, expected = given if isinstance(given, tuple) else (given, given)
            assert getattr(read(tmp_path, **{key: written})[0], key) == expected


def _other(key: str) -> Any:
    """A value that is not the default."""
    kind = str(HONOURED[key].type)
    if "Path" in kind:
        return "text", Path("text")
    if "bool" in kind:
        return not DEFAULTS[key]
    return "text" if "str" in kind else 0.25 if "float" in kind else 7


def test_keys_that_need_others_reach_the_recipe(tmp_path: Path) -> None:
    evaluated, _ = read(
        tmp_path,
        do_eval=True,
        do_predict=True,
        predict_with_generate=True,
        dataset="a,b",
        eval_dataset="a,b",
        eval_on_each_dataset=True,
        eval_strategy="steps",
        eval_on_start=True,
        eval_steps=5,
        save_steps=10,
        load_best_model_at_end=True,
        early_stopping_steps=3,
        metric_for_best_model="b_loss",
        mix_strategy="interleave_over",
        interleave_probs="0.5,0.5",
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": 1e-6},
        publish="pebble",
        publish_every_steps=5,
    )
    preferred, _ = read(tmp_path, stage="dpo", ref_model_adapters=".", ref_logprobs="serving")
    assert evaluated.metric_for_best_model == "b_loss" and evaluated.greater_is_better is False
    for key in TOGETHER:
        assert DEFAULTS[key] != getattr(preferred if key.startswith("ref_") else evaluated, key)


def test_a_senseless_value_is_refused_with_its_line(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for key in HONOURED:
        with subtests.test(key=key), pytest.raises(InvalidValueError, match=rf"recipe.yaml:\d+: {key}[.:]"):
            read(tmp_path, **{key: {"senseless": []}})


def test_null_is_the_default_of_keys_without_one() -> None:
    nullable = NULLABLE - {"enable_thinking"}
    assert nullable and {key: DEFAULTS[key] for key in nullable} == dict.fromkeys(nullable)


def test_a_refused_key_passes_when_it_is_off_and_says_why_when_it_is_on(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for key, known in REFUSED.items():
        with subtests.test(key=key):
            for off in known.passing:
                assert read(tmp_path, **{key: off})[1] == []
            with pytest.raises(InvalidValueError) as caught:
                read(tmp_path, **{key: "something"})
            assert f"recipe.yaml:4: {key}: 'something': refused: {known.reason}" in str(caught.value)


def test_a_key_without_effect_gets_one_line_unless_it_is_at_its_default(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    unchanged = read(tmp_path)[0]
    for key, known in WARNED.items():
        with subtests.test(key=key):
            assert read(tmp_path, **{key: known.default if known.default != "" else "''"})[1] == []
            recipe, notes = read(tmp_path, **{key: "something"})
            assert recipe == unchanged
            assert len(notes) == (known.reason is not None)
            assert all(note.startswith(f"{tmp_path}/recipe.yaml:4: {key}: ") and "no effect" in note for note in notes)


ALIASES: list[tuple[dict[str, Any], str, Any]] = [
    ({"evaluation_strategy": "epoch", "val_size": 0.1}, "eval_strategy", "epoch"),
    ({"adapter_name_or_path": ".", "adapter_folder": "."}, "adapter_name_or_path", Path(".")),
    ({"neat_packing": True}, "packing", True),
    ({"neat_packing": False, "packing": True}, "packing", True),
    ({"gradient_checkpointing": True}, "activations", "recompute"),
    ({"gradient_checkpointing": False}, "activations", "recompute"),
    ({"kt_cpu_activation": "retain"}, "activations", "retain"),
    ({"kt_cpu_activation": "recompute"}, "activations", "recompute"),
    ({"use_kt": True}, "stage", "sft"),
    ({"ref_model": "m", "stage": "dpo"}, "stage", "dpo"),
    ({"create_new_adapter": True}, "adapter_name_or_path", None),
    ({"kt_config": {"num_threads": 12}}, "cpu_infer", 12),
    ({"kt_config": {"kt_lora_rank": 4}}, "lora_rank", 4),
    ({"kt_config": {"lora_alpha": 4}}, "served_alpha", 4.0),
    ({"kt_config": {"kt_weight_path": "w"}}, "kt_weight_path", Path("w")),
    ({"kt_config": {"activation_policy": {"cpu": "retain", "gpu": "retain"}}}, "activations", "retain"),
    ({"kt_config": {"enabled": True, "train_mode": "lora"}}, "kt_config", {"train_mode": "lora"}),
    ({"kt_config": {}}, "kt_config", {}),
    ({"kt_config": None}, "kt_config", {}),
]
NOTED: list[tuple[dict[str, Any], str]] = [
    ({"use_kt": False}, "use_kt: False: the experts are kt-runtime's own"),
    ({"infer_backend": "vllm"}, "infer_backend: 'vllm': SGLang answers"),
    (
        {"kt_config": {"activation_policy": {"cpu": "retain", "gpu": "recompute"}}},
        "kt_config.activation_policy: {'cpu': 'retain', 'gpu': 'recompute'}: there is one policy for both: retain",
    ),
    ({"kt_config": {"max_cache_depth": 2}}, "kt_config.max_cache_depth: 2: no effect"),
]


def test_an_alias_means_the_other_key(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for keys, attribute, value in ALIASES:
        with subtests.test(keys=keys):
            recipe, notes = read(tmp_path, **keys)
            assert getattr(recipe, attribute) == value
            assert notes == []


def test_some_aliases_get_a_line(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for keys, expected in NOTED:
        with subtests.test(keys=keys):
            (note,) = read(tmp_path, **keys)[1]
            assert expected in note


def test_swanlab_is_one_of_the_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_installed", lambda package: package != "mlflow")
    assert read(tmp_path, use_swanlab=True, report_to="wandb")[0].report_to == ("wandb", "swanlab")
    assert read(tmp_path, report_to="all")[0].report_to == ("tensorboard", "wandb", "swanlab", "trackio")
    with pytest.raises(InvalidValueError, match="the Python package mlflow is not installed: pip install mlflow"):
        read(tmp_path, report_to=["wandb", "mlflow"])
    with pytest.raises(InvalidValueError, match=r"tensorbord is not among .*; did you mean tensorboard"):
        read(tmp_path, report_to="tensorbord")


def test_kt_config_knows_25_fields_and_refuses_others(tmp_path: Path) -> None:
    assert len(kt_config.FIELDS) == 25
    off = {name: field.passes for name, field in kt_config.FIELDS.items() if field.kind == "refused"}
    assert read(tmp_path, kt_config=off)[1] == []
    with pytest.raises(InvalidValueError) as caught:
        read(tmp_path, lora_rank=8, kt_config=dict.fromkeys(off, 1) | {"num_thread": 1, "wrap_fn": "x", "lora_rank": 4})
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/recipe.yaml: {len(off) + 3} problems")
    assert "kt_config.num_thread: 1: kt-kernel 0.7.2 has no such field; did you mean num_threads?" in message
    assert "kt_config.wrap_fn: 'x': kt-kernel sets it itself" in message
    assert f"kt_config.lora_rank: 4: lora_rank is 8 at {tmp_path}/recipe.yaml:4; leave one of the two out" in message


def test_the_documentation_is_the_table() -> None:
    text = DOCUMENT.read_text()
    start = text.index("## Honoured")
    assert text[start:].strip() == markdown().strip(), (
        "write it anew: everything from '## Honoured' on is what kt_runtime.train.recipe.table.markdown() returns"
    )
