"""What keys must agree on: each disagreement is one problem, at the line of the key to change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.recipe import Recipe, read_recipe

GOOD = "model_name_or_path: m\ndataset: identity\noutput_dir: out\n"


def read(tmp_path: Path, text: str, purpose: str = "train") -> tuple[Recipe, list[str]]:
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD + text)
    return read_recipe(path, purpose=purpose)


BROKEN: list[tuple[str, str]] = [
    ("train_on_prompt: true\nmask_history: true", "5: mask_history: True: excludes train_on_prompt, at {file}:4"),
    ("val_size: 0.1\neval_dataset: a", "4: val_size: 0.1: excludes eval_dataset, at {file}:5"),
    ("val_size: 1.5", "4: val_size: 1.5: must be a share below 1 or a whole number of rows"),
    ("stage: dpo\npacking: true", "5: packing: True: works with stage: sft only"),
    ("stage: dpo\nneat_packing: true", "5: packing: works with stage: sft only"),
    ("stage: dpo\ntrain_on_prompt: true", "5: train_on_prompt: True: works with stage: sft only"),
    (
        "stage: dpo\npref_loss: ipo\ndpo_label_smoothing: 0.1",
        "6: dpo_label_smoothing: 0.1: works with pref_loss: sigmoid only, not ipo",
    ),
    ("stage: dpo\npref_loss: kto_pair", "5: pref_loss: 'kto_pair': gone from TRL"),
    ("stage: dpo\ndpo_label_smoothing: 0.5", "5: dpo_label_smoothing: 0.5: must be a finite number of at least 0 and"),
    (
        "stage: dpo\npref_loss: orpo\nref_model_adapters: .",
        "6: ref_model_adapters: '.': pref_loss orpo has no reference",
    ),
    ("ref_model_adapters: .", "4: ref_model_adapters: '.': works with stage: dpo only"),
    ("ref_logprobs: serving", "4: ref_logprobs: 'serving': works with stage: dpo only"),
    (
        "stage: dpo\nref_logprobs: server",
        "5: ref_logprobs: 'server': must be one of twin, serving; did you mean serving?",
    ),
    (
        "stage: dpo\npref_loss: simpo\nref_logprobs: serving",
        "6: ref_logprobs: 'serving': pref_loss simpo has no reference",
    ),
    ("stage: dpo\nref_model: other", "5: ref_model: 'other': the reference is the resident model"),
    ("publish_every_steps: 5", "4: publish_every_steps: 5: needs publish: NAME"),
    ("publish: a/b", "4: publish: 'a/b': adapter name 'a/b': expected 1 to 128"),
    ("publish: true", "4: publish: True: must be text, in quotes"),
    ("eval_strategy: steps", "4: eval_strategy: 'steps': needs data to evaluate on: eval_dataset, or val_size"),
    ("do_eval: true", "4: do_eval: True: needs data to evaluate on"),
    ("eval_on_each_dataset: true", "4: eval_on_each_dataset: True: needs eval_dataset"),
    ("do_predict: true\nval_size: 5", "4: do_predict: True: needs predict_with_generate: true"),
    ("do_train: false", "4: do_train: False: nothing is left to do"),
    (
        "val_size: 5\neval_strategy: epoch\nearly_stopping_steps: 2\nmetric_for_best_model: accuracy",
        "7: metric_for_best_model: 'accuracy': needs compute_accuracy: true",
    ),
    (
        "val_size: 5\neval_strategy: epoch\nearly_stopping_steps: 2\nmetric_for_best_model: eval_los",
        "7: metric_for_best_model: 'eval_los': no figure of an evaluation; did you mean loss?; known: loss, accuracy",
    ),
    (
        "eval_dataset: a,b\neval_strategy: epoch\neval_on_each_dataset: true\nearly_stopping_steps: 2\n"
        "metric_for_best_model: loss",
        "8: metric_for_best_model: 'loss': eval_on_each_dataset has figures of each dataset alone: a_loss, b_loss",
    ),
    ("load_best_model_at_end: true", "4: load_best_model_at_end: True: needs evaluation while training"),
    ("early_stopping_steps: 2", "4: early_stopping_steps: 2: needs evaluation while training"),
    (
        "val_size: 5\neval_strategy: epoch\nload_best_model_at_end: true",
        "6: load_best_model_at_end: True: needs save_strategy (steps) and eval_strategy (epoch) alike",
    ),
    (
        "val_size: 5\neval_strategy: steps\neval_steps: 3\nsave_steps: 10\nload_best_model_at_end: true",
        "8: load_best_model_at_end: True: needs save_steps (10) to be a multiple of eval_steps (3)",
    ),
    (
        "val_size: 5\neval_strategy: steps\neval_steps: 0.2\nsave_steps: 0.3\nload_best_model_at_end: true",
        "8: load_best_model_at_end: True: needs save_steps (0.3) to be a multiple of eval_steps (0.2)",
    ),
    ("save_strategy: best", "4: save_strategy: 'best': needs evaluation while training"),
    (
        "val_size: 5\neval_strategy: epoch\nsave_strategy: best\nmetric_for_best_model: x",
        "7: metric_for_best_model: 'x': no figure",
    ),
    ("save_steps: 1.5", "4: save_steps: 1.5: must be a whole number of steps of at least 1, or a share of all"),
    ("logging_steps: 0", "4: logging_steps: 0: must be a whole number of steps of at least 1, or a share of all"),
    ("interleave_probs: 0.5", "4: interleave_probs: 0.5: must be numbers separated by commas"),
    ("interleave_probs: '1'", "4: interleave_probs: '1': needs mix_strategy: interleave_under"),
    (
        "mix_strategy: interleave_over\ninterleave_probs: 0.5,0.5",
        "5: interleave_probs: '0.5,0.5': must be one for each dataset: 1, not 2",
    ),
    ("dataset_dir: ONLINE", "4: dataset_dir: 'ONLINE': datasets are read from this machine only"),
    ("adapter_name_or_path: a,b", "4: adapter_name_or_path: 'a,b': more than one adapter would be merged"),
    (
        "adapter_name_or_path: org/adapter",
        "4: adapter_name_or_path: 'org/adapter': org/adapter is not on this machine, and nothing",
    ),
    ("adapter_folder: x", "4: adapter_folder: 'x': is a folder of adapter_name_or_path, which is missing"),
    ("adapter_name_or_path: .\ncreate_new_adapter: true", "5: create_new_adapter: True: the adapter at {file}:4"),
    ("resume_from_checkpoint: none-here", "4: resume_from_checkpoint: 'none-here': none-here is not a directory"),
    (
        "disable_gradient_checkpointing: true\ngradient_checkpointing: true",
        "5: gradient_checkpointing: True: disable_gradient_checkpointing is true at {file}:4",
    ),
    (
        "disable_gradient_checkpointing: true\nkt_cpu_activation: recompute",
        "5: kt_cpu_activation: 'recompute': disable_gradient_checkpointing is true at {file}:4",
    ),
    ("packing: false\nneat_packing: true", "5: neat_packing: True: packing is false at {file}:4"),
    ("finetuning_type: full", "4: finetuning_type: 'full': full would change weights that are shared with serving"),
    ("template: deepseek_3", "4: template: 'deepseek_3': no template of a model that is served here; did you mean"),
    ("optim: adafactor", "4: optim: 'adafactor': must be one of adamw_torch_fused"),
    (
        "lr_scheduler_type: cosin",
        "4: lr_scheduler_type: 'cosin': must be one of linear, cosine, .*; did you mean cosine?",
    ),
    (
        "lr_scheduler_type: cosine\nlr_scheduler_kwargs:\n  num_cycles: 0.5\n  min_lr: 0.1",
        "7: lr_scheduler_kwargs.min_lr: 0.1: cosine does not know it; it has num_cycles",
    ),
    (
        "lr_scheduler_type: polynomial\nlr_scheduler_kwargs: '{\"power\": -1}'",
        "5: lr_scheduler_kwargs.power: -1: must be",
    ),
    (
        "lr_scheduler_type: polynomial\nlearning_rate: 1e-8",
        "5: learning_rate: 1e-08: must be above the schedule's lr_end",
    ),
    (
        "lr_scheduler_type: cosine_with_min_lr",
        "4: lr_scheduler_type: 'cosine_with_min_lr': .* needs min_lr or min_lr_rate",
    ),
    ("lr_scheduler_type: warmup_stable_decay", "4: lr_scheduler_type: 'warmup_stable_decay': .* needs num_decay_steps"),
    ("lr_scheduler_type: greedy", "4: lr_scheduler_type: 'greedy': follows evaluation"),
    ("lr_scheduler_kwargs: 3", "4: lr_scheduler_kwargs: 3: must be a mapping"),
    ("warmup_steps: 2.5", "4: warmup_steps: 2.5: must be a whole number of steps, or a share of them below 1"),
    ("lora_target: a,,b", "4: lora_target: 'a,,b': must be names separated by commas; one of them is empty"),
    ("eval_dataset: [a, a]", r"4: eval_dataset: \['a', 'a'\]: contains a name twice"),
    (
        "evaluation_strategy: epoch\neval_strategy: steps\nval_size: 2",
        "4: evaluation_strategy: 'epoch': is the old name",
    ),
]


AGREED: list[tuple[str, str, Any]] = [
    ("val_size: 0.1\neval_strategy: steps\nlogging_steps: 7", "eval_steps", 7),
    ("do_eval: true\nval_size: 3", "do_train", False),
    ("", "do_train", True),
    ("stage: dpo\npref_loss: simpo\npref_ftx: 0.5", "pref_ftx", 0.5),
    ("val_size: 5\neval_strategy: epoch\nlr_scheduler_type: reduce_lr_on_plateau", "metric_for_best_model", "loss"),
    (
        "val_size: 5\neval_strategy: epoch\nearly_stopping_steps: 2\nmetric_for_best_model: accuracy\n"
        "compute_accuracy: true",
        "greater_is_better",
        True,
    ),
    (
        "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-6}",
        "lr_scheduler_kwargs",
        {"min_lr": 1e-6},
    ),
    ("warmup_steps: 0.1", "warmup_steps", 0.1),
    ("warmup_steps: 10.0", "warmup_steps", 10),
    ("resume_from_checkpoint: .", "resume_from_checkpoint", Path(".")),
    ("resume_from_checkpoint: false", "resume_from_checkpoint", False),
]


def test_a_disagreement_is_one_problem_with_its_line(tmp_path: Path, subtests: pytest.Subtests) -> None:
    file = tmp_path / "recipe.yaml"
    for text, expected in BROKEN:
        with subtests.test(text):
            with pytest.raises(InvalidValueError) as caught:
                read(tmp_path, text)
            message = str(caught.value)
            first, *problems = message.splitlines()
            assert first == f"{file}: 1 problem", message
            pattern = expected if ".*" in expected or "\\[" in expected else re.escape(expected.format(file=file))
            assert re.search(rf"^  {re.escape(str(file))}:{pattern}", problems[0]), message


def test_what_agrees_is_read(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for text, attribute, value in AGREED:
        with subtests.test(text):
            assert getattr(read(tmp_path, text)[0], attribute) == value


def test_preference_keys_without_dpo_and_a_hidden_warmup_get_a_line(tmp_path: Path) -> None:
    _, notes = read(tmp_path, "pref_beta: 0.2\npref_loss: sigmoid\nwarmup_ratio: 0.1\nwarmup_steps: 5")
    file = tmp_path / "recipe.yaml"
    assert notes == [
        f"{file}:4: pref_beta: 0.2: no effect with stage: sft",
        f"{file}:6: warmup_ratio: 0.1: no effect: warmup_steps, at {file}:7, overrides it",
    ]


def test_each_purpose_needs_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model_name_or_path: m\nadapter_name_or_path: published-name\n")
    for purpose in ("chat", "export"):
        assert read_recipe(path, purpose=purpose)[0].adapter_name_or_path == Path("published-name")
    with pytest.raises(InvalidValueError, match="eval_dataset: is missing: name the data to answer"):
        read_recipe(path, purpose="predict")
    with pytest.raises(InvalidValueError) as caught:
        read_recipe(path)
    assert all(key in str(caught.value) for key in ("output_dir: is missing", "dataset: is missing", "published-name"))
