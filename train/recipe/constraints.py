"""Rules across several keys. Each function checks a draft whose values have passed their own checks.

An invalid value is removed from the draft, so that a search for further problems does not report it again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kt_runtime.errors import UserError
from kt_runtime.train.recipe.checks import BUILT_IN_REWARDS, nearest
from kt_runtime.train.recipe.draft import Draft
from kt_runtime.train.recipe.fields import BEST
from kt_runtime.train.recipe.schedules import BY_METRIC, check_arguments

PURPOSES = ("train", "predict", "chat", "export")
_PREFERENCE_KEYS = ("pref_beta", "pref_loss", "pref_ftx", "dpo_label_smoothing", "simpo_gamma")
_REFERENCE_KEYS = ("ref_model_adapters", "ref_logprobs")
_PREFERENCE_FIGURES = (
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected"),
    *("logits/chosen", "logits/rejected", "sft_loss", "odds_ratio_loss"),
)
_SFT_ONLY = ("packing", "train_on_prompt", "mask_history", "predict_with_generate")
_REINFORCEMENT_KEYS = (
    *("reward", "reward_pattern", "num_generations", "rollout_batch_size", "steps_per_rollout", "async_rollouts"),
    *("advantage_estimator", "policy_loss", "clip_low", "clip_high", "dro_beta", "kl_coef", "routing_replay"),
)
_REINFORCEMENT_FIGURES = ("reward", "completions/mean_length", "completions/truncated")
_WHOLE_DISTRIBUTION = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
_CLIPPING = ("ppo", "cispo", "gspo")
_NEED_DATA = ("do_eval", "do_predict", "eval_on_start")


def check(draft: Draft, purpose: str) -> None:
    """Adds problems and notes, and fills in defaults that depend on other keys."""
    for look in _ALL:
        look(draft)
    _required(draft, purpose)
    if purpose == "train":
        _paths(draft)
        _reward_file(draft)
    if purpose in ("train", "predict"):
        _output(draft)


def _required(draft: Draft, purpose: str) -> None:
    needed = ["model_name_or_path"]
    if purpose == "train":
        needed += ["output_dir"] + ["dataset"] * bool(draft.get("do_train"))
    for key in needed:
        if not draft.values.get(key) and not draft.is_written(key):
            draft.problem(key, "is missing")
        elif draft.is_written(key) and draft.written[key] is None:
            draft.problem(key, "must not be null here")
    if purpose == "predict" and not (draft.get("eval_dataset") or draft.get("dataset")):
        draft.problem("eval_dataset", "is missing: name the data to answer, in eval_dataset or dataset")


def _tasks(draft: Draft) -> None:
    asked = [key for key in ("do_eval", "do_predict") if draft.get(key)]
    if not asked and not draft.is_written("do_train"):
        draft.values["do_train"] = True
    elif not asked and draft.values.get("do_train") is False:
        draft.problem("do_train", "nothing is left to do; say do_train, do_eval or do_predict: true")
    if draft.get("do_predict") and not draft.get("predict_with_generate"):
        draft.problem("do_predict", "needs predict_with_generate: true")


def _stage(draft: Draft) -> None:
    stage = draft.get("stage")
    if stage != "sft":
        for key in _SFT_ONLY:
            if draft.get(key):
                draft.problem(key, "works with stage: sft only")
    if stage != "dpo":
        _without_effect(draft, _PREFERENCE_KEYS)
    if stage == "grpo":
        _reinforcement(draft)
    else:
        _without_effect(draft, _REINFORCEMENT_KEYS)
    _reference(draft)


def _without_effect(draft: Draft, keys: Sequence[str]) -> None:
    for key in keys:
        if key in draft.values and draft.values[key] != draft.default(key):
            draft.note(key, f"no effect with stage: {draft.get('stage')}")


def _reference(draft: Draft) -> None:
    asked_of_reference = [key for key in _REFERENCE_KEYS if draft.get(key) != draft.default(key)]
    if draft.get("stage") == "dpo":
        smoothing, loss = draft.get("dpo_label_smoothing"), draft.get("pref_loss")
        if smoothing and loss != "sigmoid":
            draft.problem("dpo_label_smoothing", f"works with pref_loss: sigmoid only, not {loss}")
        if loss in ("orpo", "simpo"):
            for key in asked_of_reference:
                draft.problem(key, f"pref_loss {loss} has no reference; leave one of the two out")
        return
    for key in asked_of_reference:
        if draft.get("stage") == "grpo" and key == "ref_model_adapters":
            if not draft.get("kl_coef"):
                draft.problem(key, "needs kl_coef: without it there is no reference")
        else:
            stages = "dpo" if key == "ref_logprobs" else "dpo or grpo"
            draft.problem(key, f"works with stage: {stages} only")


def _reinforcement(draft: Draft) -> None:
    for key, value in _WHOLE_DISTRIBUTION.items():
        if draft.values.get(key) is None:
            draft.values[key] = value
    _sampling(draft)
    _reward(draft)
    if draft.get("compute_accuracy"):
        draft.problem("compute_accuracy", "works with stage: sft or dpo only")
    prompts, steps = draft.get("rollout_batch_size"), draft.get("steps_per_rollout")
    if prompts % steps:
        draft.problem("steps_per_rollout", f"must divide rollout_batch_size, {prompts}: each step has as many prompts")
        draft.values["steps_per_rollout"] = 1
    loss = draft.get("policy_loss")
    for key in ("clip_low", "clip_high"):
        if draft.get(key) is not None and loss not in _CLIPPING:
            draft.problem(key, f"works with policy_loss: {', '.join(_CLIPPING)}, not {loss}")
    if (draft.get("dro_beta") is None) == (loss == "dro"):
        draft.problem("dro_beta", "is missing: policy_loss dro needs it" if loss == "dro" else "works with dro only")
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if key in draft.values and draft.values[key] != draft.default(key):
            draft.note(key, "no effect with stage: grpo: a step has rollout_batch_size / steps_per_rollout prompts")


def _sampling(draft: Draft) -> None:
    if not draft.get("do_sample") or draft.get("temperature") == 0:
        key = "do_sample" if not draft.get("do_sample") else "temperature"
        draft.problem(key, "stage: grpo learns from the differences of sampled answers; sample them")
    elif draft.get("temperature") != 1:
        draft.note("temperature", "answers are sampled at it and trained at 1, so kl/k3 is not 0")
    if draft.get("repetition_penalty") != 1:
        draft.problem("repetition_penalty", "answers would be sampled from another distribution than the trained one")


def _reward(draft: Draft) -> None:
    asked, pattern = draft.get("reward"), draft.get("reward_pattern")
    if asked is None and not draft.is_written("reward"):
        known = ", ".join(BUILT_IN_REWARDS)
        draft.problem("reward", f"is missing: stage: grpo needs {known}, or FILE.py:FUNCTION")
    if asked == "regex" and pattern is None and not draft.is_written("reward_pattern"):
        draft.problem("reward_pattern", "is missing: reward: regex needs it")
    if pattern is not None and asked != "regex":
        draft.problem("reward_pattern", "works with reward: regex only")


def _data(draft: Draft) -> None:
    if draft.get("train_on_prompt") and draft.get("mask_history"):
        draft.problem("mask_history", f"excludes train_on_prompt, at {draft.where('train_on_prompt')}")
    if draft.get("val_size") and draft.get("eval_dataset"):
        draft.problem("val_size", f"excludes eval_dataset, at {draft.where('eval_dataset')}")
    if draft.get("val_size") and not draft.get("dataset") and not draft.is_written("dataset"):
        draft.problem("val_size", "is held out from dataset, which is missing")
    if draft.get("eval_on_each_dataset") and not draft.get("eval_dataset"):
        draft.problem("eval_on_each_dataset", "needs eval_dataset")
    probabilities = draft.get("interleave_probs")
    if probabilities is None:
        return
    if draft.get("mix_strategy") == "concat":
        draft.problem("interleave_probs", "needs mix_strategy: interleave_under, interleave_over or interleave_once")
    for key in ("dataset", "eval_dataset"):
        listed = draft.get(key)
        if listed and len(listed) != len(probabilities):
            draft.problem("interleave_probs", f"must be one for each {key}: {len(listed)}, not {len(probabilities)}")


def _template(draft: Draft) -> None:
    template = draft.get("template")
    if template is None:
        return
    from kt_runtime.train.templates.table import AUTO, TEMPLATES

    known = (AUTO, *TEMPLATES)
    if template not in known:
        listed = ", ".join(known)
        draft.problem(
            "template", f"no template of a model that is served here{nearest(template, known)}; known: {listed}"
        )
        del draft.values["template"]


def _evaluation(draft: Draft) -> None:
    strategy, has_data = draft.get("eval_strategy"), bool(draft.get("eval_dataset") or draft.get("val_size"))
    for key in [key for key in _NEED_DATA if draft.get(key)] + ["eval_strategy"] * (strategy != "no"):
        if not has_data and not draft.is_written("eval_dataset") and not draft.is_written("val_size"):
            draft.problem(key, "needs data to evaluate on: eval_dataset, or val_size")
    if strategy == "steps" and draft.get("eval_steps") is None:
        draft.values["eval_steps"] = draft.get("logging_steps")
    saves_best = draft.get("save_strategy") == BEST
    for key in ["early_stopping_steps", "load_best_model_at_end"] + ["save_strategy"] * saves_best:
        if draft.get(key) and strategy == "no":
            draft.problem(key, "needs evaluation while training: eval_strategy: steps or epoch")
    by_metric = draft.get("lr_scheduler_type") in BY_METRIC
    if by_metric and strategy == "no":
        draft.problem("lr_scheduler_type", "follows evaluation: it needs eval_strategy: steps or epoch")
    if by_metric or saves_best or draft.get("early_stopping_steps") or draft.get("load_best_model_at_end"):
        usual = "reward" if draft.get("stage") == "grpo" else "loss"
        metric = draft.values["metric_for_best_model"] = draft.get("metric_for_best_model") or usual
        if draft.get("greater_is_better") is None:
            draft.values["greater_is_better"] = not metric.endswith("loss")
        _metric(draft, metric.removeprefix("eval_"))


def _metric(draft: Draft, metric: str) -> None:
    """Reports an unavailable metric now instead of after the first evaluation."""
    if draft.get("eval_on_each_dataset") and (listed := draft.get("eval_dataset")):
        prefix = next((f"{name}_" for name in listed if metric.startswith(f"{name}_")), None)
        if prefix is None:
            figure = "reward" if draft.get("stage") == "grpo" else "loss"
            figures = ", ".join(f"{name}_{figure}" for name in listed)
            draft.problem("metric_for_best_model", f"eval_on_each_dataset has figures of each dataset alone: {figures}")
            return
        metric = metric.removeprefix(prefix)
    known = ("loss", "accuracy", *(_PREFERENCE_FIGURES if draft.get("stage") == "dpo" else ()))
    if draft.get("stage") == "grpo":
        known = _REINFORCEMENT_FIGURES
    if metric not in known:
        draft.problem(
            "metric_for_best_model", f"no figure of an evaluation{nearest(metric, known)}; known: {', '.join(known)}"
        )
    elif metric == "accuracy" and not draft.get("compute_accuracy"):
        draft.problem("metric_for_best_model", "needs compute_accuracy: true")


def _best_model(draft: Draft) -> None:
    """As in transformers, every evaluation needs a checkpoint to restore the best model from."""
    if not draft.get("load_best_model_at_end") or draft.get("eval_strategy") == "no":
        return
    save, evaluate = draft.get("save_strategy"), draft.get("eval_strategy")
    if save == BEST:
        return
    if save != evaluate:
        draft.problem("load_best_model_at_end", f"needs save_strategy ({save}) and eval_strategy ({evaluate}) alike")
    elif save == "steps" and not _is_multiple(draft.get("save_steps"), draft.get("eval_steps")):
        steps = f"save_steps ({draft.get('save_steps')})"
        draft.problem(
            "load_best_model_at_end", f"needs {steps} to be a multiple of eval_steps ({draft.get('eval_steps')})"
        )


def _is_multiple(of: float, unit: float) -> bool:
    """Shares are compared in millionths, so that 0.3 is a multiple of 0.1."""
    return of % unit == 0 or (of < 1 and unit < 1 and round(of * 1_000_000) % max(1, round(unit * 1_000_000)) == 0)


def _schedule(draft: Draft) -> None:
    name, given = draft.get("lr_scheduler_type"), draft.get("lr_scheduler_kwargs") or {}
    checked, wrong = check_arguments(name, given)
    for key, what in wrong:
        full = f"lr_scheduler_kwargs.{key}" if key else "lr_scheduler_kwargs"
        if key:
            draft.written[full] = given[key]
            draft.places.setdefault(full, draft.where("lr_scheduler_kwargs"))
        elif not draft.is_written(full):
            full = "lr_scheduler_type"
        draft.problem(full, what)
    draft.values["lr_scheduler_kwargs"] = checked
    rate = draft.get("learning_rate")
    if name == "polynomial" and not wrong and checked.get("lr_end", 1e-7) >= rate:
        draft.problem("learning_rate", f"must be above the schedule's lr_end, {checked.get('lr_end', 1e-7):g}")
    if draft.get("warmup_steps") and draft.get("warmup_ratio"):
        draft.note("warmup_ratio", f"no effect: warmup_steps, at {draft.where('warmup_steps')}, overrides it")


def _publishing(draft: Draft) -> None:
    if draft.get("publish_every_steps") and not draft.get("publish") and not draft.is_written("publish"):
        draft.problem("publish_every_steps", "needs publish: NAME, the adapter's name on the server")


def _answers(draft: Draft) -> None:
    """LLaMA-Factory's default, 1024, passes silently: there, too, max_new_tokens above 0 overrides max_length."""
    if draft.get("max_length") not in (None, 1024):
        draft.note("max_length", "no effect: max_new_tokens overrides it")


def _paths(draft: Draft) -> None:
    """Checks local paths before anything else: nothing is ever downloaded. An adapter may be a GGUF file."""
    for key in ("adapter_name_or_path", "ref_model_adapters"):
        path = draft.get(key)
        if path is not None and not os.path.exists(path):
            draft.problem(key, f"{path} is not on this machine, and nothing is downloaded")
            del draft.values[key]
    resumed = draft.get("resume_from_checkpoint")
    if resumed is not None and not isinstance(resumed, bool) and not os.path.isdir(resumed):
        draft.problem("resume_from_checkpoint", f"{resumed} is not a directory on this machine")
        del draft.values["resume_from_checkpoint"]


def _reward_file(draft: Draft) -> None:
    """Reads the file of a reward without running it. A file that is not in the working directory is looked up next
    to the recipe."""
    asked = draft.get("reward")
    if draft.get("stage") != "grpo" or asked is None or asked in BUILT_IN_REWARDS:
        return
    from kt_runtime.train.recipe.reward_file import check_function

    name, _, function = asked.rpartition(":")
    beside = Path(draft.source).parent / name
    file = beside if not os.path.isfile(name) and beside.is_file() else Path(name)
    try:
        check_function(file, function)
    except UserError as error:
        draft.problem("reward", str(error))
        del draft.values["reward"]
    else:
        draft.values["reward"] = f"{file}:{function}"


def _output(draft: Draft) -> None:
    """Checks, before a model is loaded, that the output directory exists or can be created, and is writable."""
    wanted = draft.values.get("output_dir")
    if wanted is None:
        return
    nearest_there = next(str(path) for path in (wanted.absolute(), *wanted.absolute().parents) if os.path.exists(path))
    if not os.path.isdir(nearest_there):
        draft.problem("output_dir", f"{nearest_there} is not a directory")
    elif not os.access(nearest_there, os.W_OK | os.X_OK):
        draft.problem("output_dir", f"{nearest_there} can't be written to")


_ALL: tuple[Callable[[Draft], None], ...] = (
    _tasks,
    _stage,
    _data,
    _template,
    _evaluation,
    _best_model,
    _schedule,
    _publishing,
    _answers,
)
