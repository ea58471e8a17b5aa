"""The recipe: every key that is honoured, with its type, default, check and one line of explanation.

Names and defaults are LLaMA-Factory 0.9.5's (those of transformers' TrainingArguments among them). `publish`,
`publish_every_steps`, `ref_logprobs` and the keys of `stage: grpo` are kt-runtime's own.
"""

# ruff: noqa: RUF009  (`key` is dataclasses.field with metadata)

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kt_runtime.train.recipe import checks
from kt_runtime.train.recipe.checks import Check, names, number, one_of, optional, text, truth, whole
from kt_runtime.train.recipe.others import TABLE
from kt_runtime.train.recipe.schedules import BY_METRIC
from kt_runtime.train.recipe.schedules import NAMES as SCHEDULES

REFUSED_VALUES = TABLE.refused_values
BEST = "best"
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "adamw_hf", "adamw_apex_fused")


def key(default: Any, check: Check, line: str, *, alias: bool = False) -> Any:
    """`alias`: the value is compared with the resident model instead of being honoured."""
    return field(default=default, metadata={"check": check, "line": line, "alias": alias})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A checked recipe. Sizes are in tokens or sequences, steps are optimizer steps, rates are per optimizer step."""

    # model
    model_name_or_path: str = key("", text, "must be the resident model; without a server, the one that is started")
    adapter_name_or_path: Path | None = key(None, optional(checks.one_adapter), "one adapter to continue from")
    disable_gradient_checkpointing: bool = key(False, truth, "false recomputes activations, true retains them")

    # method
    stage: str = key("sft", one_of("sft", "dpo", "grpo", why=REFUSED_VALUES["stage"]), "sft, dpo or grpo")
    do_train: bool = key(False, truth, "train; the default when no do_... key is given")
    do_eval: bool = key(False, truth, "evaluate at the end")
    do_predict: bool = key(False, truth, "answer the evaluation data; needs predict_with_generate")
    predict_with_generate: bool = key(False, truth, "write answers and their BLEU and ROUGE")
    finetuning_type: str = key("lora", one_of("lora", why=REFUSED_VALUES["finetuning_type"]), "lora")
    lora_rank: int = key(8, whole(1), "at most the server's --max-lora-rank")
    lora_alpha: float | None = key(None, optional(number(0, above=True)), "default 2 x lora_rank")
    lora_dropout: float = key(0.0, number(0, 1), "dropout before LoRA's A")
    lora_target: tuple[str, ...] = key(
        ("all",), names, "all (attention, dense, shared and routed experts; never router or head), groups or names"
    )
    use_rslora: bool = key(False, truth, "alpha / sqrt(rank), folded into lora_alpha when saved")
    loraplus_lr_ratio: float | None = key(None, optional(number(0, above=True)), "learning rate of B over that of A")
    compute_accuracy: bool = key(False, truth, "token accuracy at evaluation")
    disable_shuffling: bool = key(False, truth, "take rows in the order of the data")
    early_stopping_steps: int | None = key(
        None, optional(whole(1)), "evaluations without a better metric before the end"
    )
    include_effective_tokens_per_second: bool = key(False, truth, "log tokens/s")

    # preference
    pref_beta: float = key(0.1, number(0, above=True), "beta of the preference loss")
    pref_loss: str = key(
        "sigmoid",
        one_of("sigmoid", "hinge", "ipo", "orpo", "simpo", why=REFUSED_VALUES["pref_loss"]),
        "the preference loss",
    )
    pref_ftx: float = key(0.0, number(0), "weight of the SFT loss on chosen answers")
    dpo_label_smoothing: float = key(0.0, number(0, 0.5), "with pref_loss sigmoid only")
    simpo_gamma: float = key(0.5, number(0), "SimPO's margin")
    ref_model_adapters: Path | None = key(None, optional(checks.one_adapter), "a second adapter as the reference")

    # reinforcement
    reward: str | None = key(
        None,
        optional(checks.reward),
        "grpo: exact_match, contains, contains_any_case, regex, math, or FILE.py:FUNCTION, which the trainer runs",
    )
    reward_pattern: str | None = key(
        None, optional(checks.pattern), "of reward: regex; a group named answer must equal the row's answer"
    )
    num_generations: int = key(8, whole(2), "grpo: answers sampled to each prompt, which form a group")
    rollout_batch_size: int = key(8, whole(1), "grpo: prompts of a rollout")
    steps_per_rollout: int = key(1, whole(1), "grpo: optimizer steps among which a rollout's prompts are divided")
    async_rollouts: bool = key(False, truth, "grpo: sample the next rollout during a rollout's steps")
    advantage_estimator: str = key(
        "grpo",
        one_of("grpo", "rloo", "dr_grpo"),
        "how rewards become advantages and weights of tokens: docs/recipes.md",
    )
    policy_loss: str = key(
        "ppo", one_of("importance_sampling", "ppo", "cispo", "dro", "gspo"), "grpo: the loss of a sampled token"
    )
    clip_low: float | None = key(
        None, optional(number(0, upto=1)), "lowest probability ratio; default ppo 0.8, cispo 0, gspo 0.9997"
    )
    clip_high: float | None = key(
        None, optional(number(1, upto=1e6)), "highest probability ratio; default ppo 1.2, cispo 4, gspo 1.0004"
    )
    dro_beta: float | None = key(None, optional(number(1e-9, upto=1e6)), "of policy_loss: dro, which needs it")
    kl_coef: float = key(
        0.0, number(0), "grpo: weight of the divergence from the reference (the start), taken from the advantages"
    )
    routing_replay: str = key(
        "off",
        one_of("off", "compare", "rollout"),
        "grpo: rollout trains each token with the experts that sampling chose for it; compare counts those that moved",
    )

    # dataset
    dataset: tuple[str, ...] = key((), optional(names), "names in dataset_info.json")
    eval_dataset: tuple[str, ...] = key((), optional(names), "names in dataset_info.json")
    dataset_dir: Path = key(
        Path("data"), checks.dataset_directory, "from the working directory, then from the recipe's"
    )
    template: str | None = key(
        None, optional(text), "default: the model's own chat template; another is honoured and shown"
    )
    cutoff_len: int = key(2048, whole(2), "tokens of an example; at most the model's context")
    train_on_prompt: bool = key(False, truth, "sft; not with mask_history")
    mask_history: bool = key(False, truth, "sft; train the last answer only")
    packing: bool = key(False, optional(truth), "several examples in one row, which never see each other")
    mix_strategy: str = key(
        "concat", one_of("concat", "interleave_under", "interleave_over", "interleave_once"), "how datasets are joined"
    )
    interleave_probs: tuple[float, ...] | None = key(None, optional(checks.numbers), "one for each dataset")
    max_samples: int | None = key(None, optional(whole(1)), "the first rows of each dataset")
    val_size: float = key(0.0, checks.validation_size, "share below 1 or rows held out; not with eval_dataset")
    eval_on_each_dataset: bool = key(False, truth, "figures for each eval_dataset")
    default_system: str | None = key(None, optional(text), "the system prompt of rows without one")
    enable_thinking: bool | None = key(True, optional(truth), "for reasoning templates")
    preserve_thinking: bool = key(False, truth, "for reasoning templates: keep earlier turns' thoughts")
    reasoning_effort: str | None = key(None, optional(text), "for reasoning templates")

    # output
    output_dir: Path = key(Path(), checks.path, "needed to train")
    overwrite_output_dir: bool = key(False, truth, "start over although there is a run")
    logging_strategy: str = key("steps", one_of("steps", "epoch", "no"), "when to log")
    logging_steps: int | float = key(500, checks.steps, "steps between log lines, or below 1 a fraction of all steps")
    logging_first_step: bool = key(False, truth, "log the first step, too")
    save_strategy: str = key(
        "steps", one_of("steps", "epoch", BEST, "no"), "when to write checkpoints; best: after each best evaluation"
    )
    save_steps: int | float = key(500, checks.steps, "steps between checkpoints, or below 1 a fraction of all steps")
    save_total_limit: int | None = key(None, optional(whole(1)), "checkpoints that are kept")
    save_only_model: bool = key(False, truth, "the adapter without the optimizer; such a run can't be resumed")
    plot_loss: bool = key(False, truth, "write training_loss.png")
    report_to: tuple[str, ...] = key(
        (), checks.trackers, "none, tensorboard, wandb, swanlab, mlflow, trackio; list or text"
    )
    run_name: str | None = key(None, optional(text), "the run's name for report_to")

    # training
    per_device_train_batch_size: int = key(8, whole(1), "sequences sent at once")
    gradient_accumulation_steps: int = key(1, whole(1), "batches in one optimizer step")
    learning_rate: float = key(5e-5, number(0, above=True), "the highest rate of the schedule")
    num_train_epochs: float = key(3.0, number(0, above=True), "passes over the data")
    max_steps: int = key(-1, whole(-1), "above 0: instead of num_train_epochs")
    lr_scheduler_type: str = key("linear", one_of(*SCHEDULES), "every name of transformers.get_scheduler")
    lr_scheduler_kwargs: dict[str, Any] = field(
        default_factory=dict, metadata={"check": optional(checks.mapping), "line": "the schedule's own", "alias": False}
    )
    warmup_ratio: float | None = key(None, optional(number(0, upto=1)), "share of all steps; warmup_steps overrides it")
    warmup_steps: float = key(0, checks.warmup, "steps, or below 1 a fraction of them")
    optim: str = key("adamw_torch_fused", one_of(*OPTIMIZERS), "adamw, always with float32 moments")
    weight_decay: float = key(0.0, number(0), "AdamW's")
    max_grad_norm: float = key(1.0, number(0), "0: gradients are not clipped")
    adam_beta1: float = key(0.9, number(0, 1), "AdamW's")
    adam_beta2: float = key(0.999, number(0, 1), "AdamW's")
    adam_epsilon: float = key(1e-8, number(0, above=True), "AdamW's")
    seed: int = key(42, whole(0, 2**32 - 1), "of LoRA's A, dropout and the order of rows")
    data_seed: int | None = key(None, optional(whole(0, 2**32 - 1)), "of the order of rows; default: seed")
    resume_from_checkpoint: bool | Path | None = key(
        None, checks.resume, "a checkpoint, the output_dir that holds it, or true: the last one"
    )

    # evaluation
    per_device_eval_batch_size: int = key(8, whole(1), "sequences sent at once")
    eval_strategy: str = key("no", one_of("no", "steps", "epoch"), "when to evaluate")
    eval_steps: int | float | None = key(
        None, optional(checks.steps), "steps, or below 1 a fraction of them; default: logging_steps"
    )
    eval_on_start: bool = key(False, truth, "evaluate before the first step")
    load_best_model_at_end: bool = key(False, truth, "the adapter of the best evaluation is the result")
    metric_for_best_model: str | None = key(None, optional(text), "default: loss")
    greater_is_better: bool | None = key(None, optional(truth), "default: unless the metric's name ends in loss")

    # answers
    do_sample: bool = key(True, truth, "false: the most likely token")
    temperature: float = key(0.95, number(0), "SGLang's")
    top_p: float = key(0.7, number(0, above=True, upto=1), "SGLang's")
    top_k: int = key(50, whole(-1), "SGLang's; 0 and -1 keep all tokens")
    max_new_tokens: int = key(1024, whole(1), "tokens of an answer")
    max_length: int | None = key(None, optional(whole(1)), "tokens of prompt and answer; max_new_tokens overrides it")
    repetition_penalty: float = key(1.0, number(0, above=True), "SGLang's")
    skip_special_tokens: bool = key(True, truth, "SGLang's")

    # export
    export_dir: Path | None = key(None, optional(checks.path), "where `kt-runtime export` writes")
    export_size: int = key(5, whole(1), "GB of the largest file")

    # KTransformers
    kt_optimize_rule: Path | None = key(None, optional(checks.path), "compared with the resident placement", alias=True)
    cpu_infer: int | None = key(None, optional(whole(1)), "compared with the server's CPU threads", alias=True)
    chunk_size: int | None = key(None, optional(whole(1)), "compared with what the server computes at once", alias=True)
    kt_weight_path: Path | None = key(None, optional(checks.path), "compared with the resident experts", alias=True)
    kt_non_expert_weight_path: Path | None = key(
        None, optional(checks.path), "compared with the resident model", alias=True
    )
    kt_expert_checkpoint_path: Path | None = key(
        None, optional(checks.path), "compared with the resident experts", alias=True
    )

    # kt-runtime
    publish: str | None = key(None, optional(checks.adapter_name), "the adapter's name on the server")
    publish_every_steps: int | None = key(None, optional(whole(1)), "publish during training too, after so many steps")
    publish_take_over: bool = key(False, truth, "take over a name of another run, which can't publish any more")
    ref_logprobs: str = key(
        "twin",
        one_of("twin", "serving"),
        "who computes a reference's log-probabilities: the training twin, or the serving path and its prefix cache",
    )

    kt_config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    places: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    source: str = field(default="recipe", repr=False, compare=False)

    @property
    def served_alpha(self) -> float:
        """The alpha for which alpha / rank is the recipe's scaling; LLaMA-Factory's default is 2 x rank."""
        alpha = 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        return alpha * math.sqrt(self.lora_rank) if self.use_rslora else alpha

    @property
    def rows_per_step(self) -> int:
        """Rows of the data (with packing, bins) in one optimizer step."""
        if self.stage == "grpo":
            return self.rollout_batch_size // self.steps_per_rollout
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def activations(self) -> str:
        """`retain` or `recompute`."""
        return "retain" if self.disable_gradient_checkpointing else "recompute"

    @property
    def tracks_best(self) -> bool:
        """Whether evaluations are compared with each other by `metric_for_best_model`."""
        follows = self.load_best_model_at_end or self.save_strategy == BEST or self.lr_scheduler_type in BY_METRIC
        return follows or self.early_stopping_steps is not None

    def where(self, key: str) -> str:
        """file:line of the key, or the recipe's file if the key has its default."""
        return self.places.get(key, self.source)


HONOURED: Mapping[str, dataclasses.Field[Any]] = {
    known.name: known for known in dataclasses.fields(Recipe) if "check" in known.metadata
}
DEFAULTS: Mapping[str, Any] = {
    name: {} if known.default is dataclasses.MISSING else known.default for name, known in HONOURED.items()
} | {"kt_config": {}}
NULLABLE = frozenset(name for name, known in HONOURED.items() if "None" in str(known.type))
