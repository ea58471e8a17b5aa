"""What keys must agree on: each disagreement is one problem, at the line of the key to change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.recipe import Recipe, read_recipe
from kt_runtime.train.recipe.checks import BUILT_IN_REWARDS

GOOD = "model_name_or_path: m\ndataset: identity\noutput_dir: out\n"

REWARDS = ", ".join(BUILT_IN_REWARDS)


def read(tmp_path: Path, text: str, purpose: str = "train") -> tuple[Recipe, list[str]]:
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD + text)
    return read_recipe(path, purpose=purpose)


GRPO = "stage: grpo\nreward: exact_match\n"
BROKEN: list[tuple[str, str]] = [
    (
        "stage: grpo",
        f" reward: is missing: stage: grpo needs {REWARDS}, or FILE.py:FUNCTION",
    ),
    (
        "stage: grpo\nreward: exact",
        f"5: reward: 'exact': must be one of {REWARDS}, or FILE.py:FUNCTION",
    ),
    ("stage: grpo\nreward: no.py:judge", "5: reward: 'no.py:judge': no.py: No such file or directory"),
    ("stage: grpo\nreward: regex", " reward_pattern: is missing: reward: regex needs it"),
    ("stage: grpo\nreward: regex\nreward_pattern: '('", "6: reward_pattern: '(': is no regular expression of Python"),
    (GRPO + "reward_pattern: a", "6: reward_pattern: 'a': works with reward: regex only"),
    (
        GRPO + "rollout_batch_size: 8\nsteps_per_rollout: 3",
        "7: steps_per_rollout: 3: must divide rollout_batch_size, 8",
    ),
    (GRPO + "num_generations: 1", "6: num_generations: 1: must be a whole number of at least 2"),
    (GRPO + "policy_loss: dro", " dro_beta: is missing: policy_loss dro needs it"),
    (GRPO + "dro_beta: 0.1", "6: dro_beta: 0.1: works with dro only"),
    (
        GRPO + "policy_loss: dro\ndro_beta: 1\nclip_low: 0.5",
        "8: clip_low: 0.5: works with policy_loss: ppo, cispo, gspo",
    ),
    (GRPO + "clip_high: 0.9", "6: clip_high: 0.9: must be a finite number of at least 1"),
    (GRPO + "temperature: 0", "6: temperature: 0: stage: grpo learns from the differences of sampled answers"),
    (GRPO + "do_sample: false", "6: do_sample: False: stage: grpo learns from the differences of sampled answers"),
    (
        GRPO + "repetition_penalty: 1.1",
        "6: repetition_penalty: 1.1: answers would be sampled from another distribution",
    ),
    (GRPO + "packing: true", "6: packing: True: works with stage: sft only"),
    (GRPO + "compute_accuracy: true", "6: compute_accuracy: True: works with stage: sft or dpo only"),
    (GRPO + "ref_model_adapters: .", "6: ref_model_adapters: '.': needs kl_coef: without it there is no reference"),
    (GRPO + "ref_logprobs: serving", "6: ref_logprobs: 'serving': works with stage: dpo only"),
    (GRPO + "beta: 0.1", "6: beta: 0.1: no such key; TRL's name; here kl_coef"),
    (GRPO + "epsilon: 0.2", "6: epsilon: 0.2: no such key; TRL's name; here clip_low (1 - epsilon) and clip_high"),
    (GRPO + "num_generation: 4", "6: num_generation: 4: no such key; did you mean num_generations?"),
    ("stage: gpro", "4: stage: 'gpro': must be one of sft, dpo, grpo; did you mean grpo?"),
    (
        GRPO + "val_size: 5\neval_strategy: epoch\nearly_stopping_steps: 2\nmetric_for_best_model: loss",
        "9: metric_for_best_model: 'loss': no figure of an evaluation; known: reward, completions/mean_length",
    ),
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
    ("ref_model_adapters: .", "4: ref_model_adapters: '.': works with stage: dpo or grpo only"),
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


def test_grpo_samples_from_the_whole_distribution_unless_told_otherwise(tmp_path: Path) -> None:
    recipe, notes = read(tmp_path, GRPO + "val_size: 5\neval_strategy: epoch\nearly_stopping_steps: 2\n")
    assert (recipe.temperature, recipe.top_p, recipe.top_k, notes) == (1.0, 1.0, -1, [])
    assert (recipe.metric_for_best_model, recipe.greater_is_better) == ("reward", True)
    assert recipe.rows_per_step == 8
    sft, _ = read(tmp_path, "")
    assert (sft.temperature, sft.top_p, sft.top_k) == (0.95, 0.7, 50)


def test_keys_of_another_stage_are_said_to_have_no_effect(tmp_path: Path) -> None:
    _, notes = read(tmp_path, GRPO + "temperature: 0.7\npref_beta: 0.2\nper_device_train_batch_size: 4\n")
    assert [note.rpartition("recipe.yaml")[2] for note in notes] == [
        ":6: temperature: 0.7: answers are sampled at it and trained at 1, so kl/k3 is not 0",
        ":7: pref_beta: 0.2: no effect with stage: grpo",
        ":8: per_device_train_batch_size: 4: no effect with stage: grpo: a step has rollout_batch_size / "
        "steps_per_rollout prompts",
    ]
    _, notes = read(tmp_path, "num_generations: 4\n")
    assert notes == [f"{tmp_path}/recipe.yaml:4: num_generations: 4: no effect with stage: sft"]


def test_the_file_of_a_reward_is_found_beside_the_recipe_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('run')\ndef judge(completion): return 1.0\n")
    recipe, _ = read(tmp_path, "stage: grpo\nreward: mine.py:judge\n")
    assert recipe.reward == f"{tmp_path}/mine.py:judge"
    with pytest.raises(
        InvalidValueError,
        match=r"5: reward: 'mine.py:jugde': .*mine.py: unknown function 'jugde'; did you mean 'judge'",
    ):
        read(tmp_path, "stage: grpo\nreward: mine.py:jugde\n")
    (tmp_path / "mine.py").write_text("def judge(completion):\n  return (\n")
    with pytest.raises(InvalidValueError, match=r"5: reward: 'mine.py:judge': .*mine.py:2: is no Python"):
        read(tmp_path, "stage: grpo\nreward: mine.py:judge\n")
