"""Recipes: what users arrive with is read as it is; everything wrong is reported at once, with its place."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference.cases import examples

from kt_runtime.errors import InvalidValueError, NotFoundError, UserError
from kt_runtime.train.recipe import Recipe, read_recipe
from kt_runtime.train.recipe.table import KNOWN

GOOD = "model_name_or_path: tiny-qwen3-moe\ndataset: identity\noutput_dir: out\n"

SEED_SFT = """\
### model
model_name_or_path: opensourcerelease/DeepSeek-V3-bf16
trust_remote_code: true

### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all

### dataset
dataset: identity
template: deepseek
cutoff_len: 2048
max_samples: 100000
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4

### output
output_dir: saves/Kllama_deepseekV3
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none  # choices: [none, wandb, tensorboard, swanlab, mlflow]

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null

### ktransformers
use_kt: true # use KTransformers as LoRA sft backend
kt_optimize_rule: examples/kt_optimize_rules/DeepSeek-V3-Chat-sft-amx-multi-gpu.yaml
cpu_infer: 32
chunk_size: 8192
"""

SEED_CHAT = """\
model_name_or_path: opensourcerelease/DeepSeek-V3-bf16
adapter_name_or_path: saves/Kllama_deepseekV3
template: deepseek
infer_backend: ktransformers  # choices: [huggingface, vllm, sglang, ktransformers]
trust_remote_code: true

use_kt: true # use KTransformers as LoRA sft backend to inference
kt_optimize_rule: examples/kt_optimize_rules/DeepSeek-V3-Chat-sft-amx-multi-gpu.yaml
cpu_infer: 32
chunk_size: 8192
"""

# LLaMA-Factory 0.9.6's own example of the second KTransformers generation, in its keys.
SECOND_GENERATION = """\
model_name_or_path: /models/DeepSeek-V3.1
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_alpha: 16
lora_target: all
dataset: identity, alpaca_en_demo
template: deepseek3
cutoff_len: 2048
output_dir: saves/KT_FT_deepseekV3_int8
report_to: none
learning_rate: 1.0e-4
bf16: true
use_kt: true
disable_gradient_checkpointing: false
kt_cpu_activation: retain
kt_weight_path: /models/routed-int8-experts
kt_non_expert_weight_path: /models/bf16-non-expert-cache
kt_config:
  kt_expert_weight_format: int8
  kt_backend: auto
  kt_weight_lifecycle: persistent
  kt_num_threads: 96
  kt_tp_enabled: true
  kt_threadpool_count: 2
  kt_max_cache_depth: 2
  kt_share_backward_bb: true
"""


def read(tmp_path: Path, text: str | bytes, *overrides: str, purpose: str = "train") -> tuple[Recipe, list[str]]:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_recipe(path, list(overrides), purpose)


def test_the_seed_recipe_is_read_unchanged(tmp_path: Path) -> None:
    recipe, notes = read(tmp_path, SEED_SFT)
    assert (recipe.lora_rank, recipe.served_alpha, recipe.template, recipe.cutoff_len) == (8, 16.0, "deepseek", 2048)
    assert (recipe.learning_rate, recipe.lr_scheduler_type, recipe.warmup_ratio) == (1e-4, "cosine", 0.1)
    assert (recipe.report_to, recipe.resume_from_checkpoint, recipe.plot_loss) == ((), None, True)
    assert recipe.kt_optimize_rule == Path("examples/kt_optimize_rules/DeepSeek-V3-Chat-sft-amx-multi-gpu.yaml")
    assert (recipe.cpu_infer, recipe.chunk_size, recipe.activations) == (32, 8192, "recompute")
    assert notes == [
        f"{tmp_path}/recipe.yaml:3: trust_remote_code: True: no effect: the resident model is already loaded",
        f"{tmp_path}/recipe.yaml:37: bf16: True: no effect: the server's dtype applies",
    ]
    assert recipe.where("cpu_infer") == f"{tmp_path}/recipe.yaml:44"
    assert recipe.where("seed") == f"{tmp_path}/recipe.yaml"


def test_the_seed_chat_recipe_needs_nothing_more_to_chat(tmp_path: Path) -> None:
    recipe, notes = read(tmp_path, SEED_CHAT, purpose="chat")
    assert recipe.adapter_name_or_path == Path("saves/Kllama_deepseekV3")
    assert any("infer_backend: 'ktransformers': SGLang answers in any case" in note for note in notes)
    with pytest.raises(InvalidValueError, match="dataset: is missing"):
        read(tmp_path, SEED_CHAT)


def test_the_second_generation_of_ktransformers_keys_is_read(tmp_path: Path) -> None:
    recipe, notes = read(tmp_path, SECOND_GENERATION)
    assert (recipe.activations, recipe.cpu_infer, recipe.dataset) == ("retain", 96, ("identity", "alpaca_en_demo"))
    assert recipe.kt_config["expert_weight_format"] == "int8" and recipe.kt_config["backend"] == "auto"
    assert recipe.where("kt_config.backend") == f"{tmp_path}/recipe.yaml:23"
    assert sum("kt_config." in note for note in notes) == 5


def test_defaults_are_llama_factorys(tmp_path: Path) -> None:
    recipe, notes = read(tmp_path, GOOD)
    assert (recipe.lora_rank, recipe.served_alpha, recipe.lora_target, recipe.cutoff_len) == (8, 16.0, ("all",), 2048)
    assert (recipe.learning_rate, recipe.num_train_epochs, recipe.max_grad_norm, recipe.seed) == (5e-5, 3.0, 1.0, 42)
    assert (recipe.pref_beta, recipe.pref_loss, recipe.temperature, recipe.top_p, recipe.top_k) == (
        0.1,
        "sigmoid",
        0.95,
        0.7,
        50,
    )
    assert notes == [] and recipe.do_train


def test_defaults_of_transformers_keys_are_transformers(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    own = {"output_dir", "report_to", "lr_scheduler_kwargs", "do_train"}
    recipe, _ = read(tmp_path, GOOD)
    theirs = {field.name: field for field in dataclasses.fields(TrainingArguments)}
    assert set(theirs) - set(KNOWN) == set(), "every field of transformers' TrainingArguments has its class"
    for name in set(theirs) & {field.name for field in dataclasses.fields(Recipe)} - own:
        expected = theirs[name].default
        assert getattr(recipe, name) == getattr(expected, "value", expected), name


def test_all_problems_are_reported_at_once_with_file_and_line(tmp_path: Path) -> None:
    text = GOOD + "lora_rnk: 8\nlora_rank: eight\nstage: ppo\nlora_rank: 9\nlora_dropout: 1.5\nmax_steps: true\n"
    with pytest.raises(InvalidValueError) as caught:
        read(tmp_path, text, "no-equals-sign", "seed=[1")
    path = tmp_path / "recipe.yaml"
    assert str(caught.value).splitlines() == [
        f"{path}: 8 problems",
        f"  {path}:4: lora_rnk: 8: no such key; did you mean lora_rank?",
        f"  {path}:5: lora_rank: 'eight': must be a whole number of at least 1",
        f"  {path}:6: stage: 'ppo': ppo is not trained here; this version trains sft, dpo and grpo",
        f"  {path}:7: lora_rank stands at {path}:5 already",
        f"  {path}:8: lora_dropout: 1.5: must be a finite number of at least 0 and below 1",
        f"  {path}:9: max_steps: True: must be a whole number of at least -1",
        "  command line: no-equals-sign is not of the form key=value",
        "  command line: seed: [1: the value is not valid YAML",
    ]


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001", "'1e-4'", ".0001"])
def test_a_learning_rate_is_read_as_the_number_it_looks_like(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, GOOD + f"learning_rate: {text}\n")[0].learning_rate == 1e-4


@pytest.mark.parametrize("text", ["inf", ".inf", "nan", "-1", "0", "true", "fast", "1_0", "null", "9" * 400])
def test_a_learning_rate_that_is_no_positive_number_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidValueError, match=r"learning_rate.*must be a finite number above 0"):
        read(tmp_path, GOOD + f"learning_rate: {text}\n")


@pytest.mark.parametrize("text", ["010", "0x10", "8.0", "'8'", "true", "1e1", "no", "0", "-1", "[8]", "{a: 8}"])
def test_a_rank_that_is_no_whole_number_as_it_stands_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidValueError, match=r"recipe.yaml:4: lora_rank: .*must be a whole number of at least 1"):
        read(tmp_path, GOOD + f"lora_rank: {text}\n")


def test_the_word_no_is_false_for_switches_and_a_name_for_choices(tmp_path: Path) -> None:
    recipe, _ = read(tmp_path, GOOD + "plot_loss: no\nsave_strategy: no\npacking: Yes\n")
    assert (recipe.plot_loss, recipe.save_strategy, recipe.packing) == (False, "no", True)


def test_overrides_win_and_are_typed(tmp_path: Path) -> None:
    recipe, _ = read(tmp_path, GOOD + "lora_rank: x\n", "lora_rank=32", "dataset=a,b", "publish=mine", "data_seed=")
    assert (recipe.lora_rank, recipe.dataset, recipe.publish, recipe.data_seed) == (32, ("a", "b"), "mine", None)
    assert recipe.where("lora_rank") == "command line"


def test_a_dotted_override_sets_one_entry_of_a_mapping(tmp_path: Path) -> None:
    text = GOOD + "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs:\n  num_cycles: 0.5\n"
    for least in ("1e-6", "'1e-6'"):
        recipe, _ = read(
            tmp_path, text, f"lr_scheduler_kwargs.min_lr={least}", "kt_config.activation_policy.cpu=retain"
        )
        assert recipe.lr_scheduler_kwargs == {"num_cycles": 0.5, "min_lr": 1e-6} and recipe.activations == "retain"
        assert recipe.where("lr_scheduler_kwargs.min_lr") == "command line"
    recipe, _ = read(tmp_path, text, "lr_scheduler_kwargs='{\"min_lr\": 1}'", "lr_scheduler_kwargs.min_lr=0")
    assert recipe.lr_scheduler_kwargs == {"min_lr": 0.0}
    assert read(tmp_path, GOOD, "output_dir='a b'", 'run_name="x: y"')[0].run_name == "x: y"


def test_a_dotted_override_that_leads_nowhere_is_a_problem(tmp_path: Path) -> None:
    overrides = (
        "seed.x=1",
        "foo.hf_token=SECRET",
        "kt_config..x=1",
        "lr_scheduler_kwargs.mn_lr=1",
        "a" + ".b" * 99 + "=1",
    )
    with pytest.raises(InvalidValueError) as caught:
        read(tmp_path, GOOD + "lr_scheduler_type: cosine_with_min_lr\n", *overrides)
    said = str(caught.value)
    for problem in (
        "command line: seed: {'x': 1}: must be a whole number",
        "command line: foo: {'hf_token': '***'}: no such key",
        "command line: kt_config..x: 1: a part of the key is empty",
        "command line: lr_scheduler_kwargs.mn_lr: 1: cosine_with_min_lr does not know it; it has",
        "no key lies deeper than 8 levels",
    ):
        assert problem in said, said


def test_steps_may_be_shares_of_all_steps(tmp_path: Path) -> None:
    text = "val_size: 5\neval_strategy: steps\neval_steps: 0.1\nsave_steps: 0.3\nload_best_model_at_end: true\n"
    recipe, _ = read(tmp_path, GOOD + text, "logging_steps=0.05")
    assert (recipe.logging_steps, recipe.save_steps, recipe.eval_steps) == (0.05, 0.3, 0.1)
    recipe, _ = read(tmp_path, GOOD, "logging_steps=10.0")
    assert recipe.logging_steps == 10 and isinstance(recipe.logging_steps, int)


def test_saving_the_best_needs_a_metric_which_is_the_loss(tmp_path: Path) -> None:
    recipe, _ = read(
        tmp_path, GOOD + "val_size: 5\neval_strategy: epoch\nsave_strategy: best\nload_best_model_at_end: true\n"
    )
    assert (recipe.metric_for_best_model, recipe.greater_is_better, recipe.tracks_best) == ("loss", False, True)


def test_a_list_may_be_text_with_commas_or_a_list(tmp_path: Path) -> None:
    for text in ("q_proj, o_proj", "[q_proj, o_proj]", "'q_proj,o_proj'"):
        assert read(tmp_path, GOOD + f"lora_target: {text}\n")[0].lora_target == ("q_proj", "o_proj")
    assert read(tmp_path, GOOD + "mix_strategy: interleave_over\n", "dataset=a,b", "interleave_probs=0.7,0.3")[
        0
    ].interleave_probs == (0.7, 0.3)


def test_rslora_is_folded_into_alpha(tmp_path: Path) -> None:
    recipe, _ = read(tmp_path, GOOD + "lora_rank: 16\nlora_alpha: 8\nuse_rslora: true\n")
    assert recipe.served_alpha / 16 == 8 / math.sqrt(16)


def test_null_is_the_default_where_a_key_has_no_null(tmp_path: Path) -> None:
    recipe, _ = read(tmp_path, GOOD + "packing: null\neval_dataset: null\nenable_thinking: null\nwarmup_ratio: null\n")
    assert (recipe.packing, recipe.eval_dataset, recipe.enable_thinking, recipe.warmup_ratio) == (False, (), None, None)


def test_byte_order_mark_and_carriage_returns_do_no_harm(tmp_path: Path) -> None:
    recipe, _ = read(tmp_path, b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert recipe.dataset == ("identity",) and recipe.where("output_dir").endswith(":3")


def test_json_is_a_recipe_too(tmp_path: Path) -> None:
    text = '{"model_name_or_path": "m", "dataset": ["a"],\n\t"output_dir": "o", "learning_rate": 1e-4, "lora_rank": 4}'
    path = tmp_path / "recipe.json"
    path.write_text(text)
    recipe, _ = read_recipe(path)
    assert (recipe.learning_rate, recipe.lora_rank, recipe.where("output_dir")) == (1e-4, 4, f"{path}:2")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty"),
        ("- a\n", r"recipe.yaml:1: a recipe is a mapping"),
        ("just text", r"recipe.yaml:1: a recipe is a mapping"),
        ("a: [1\nb: 2\n", r"recipe.yaml:2: not valid YAML"),
        ("seed: 1\n", "model_name_or_path: is missing"),
        ("model_name_or_path: null\n", r"recipe.yaml:1: model_name_or_path: None: must be text"),
    ],
)
def test_what_is_no_recipe_says_so(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(InvalidValueError, match=expected):
        read(tmp_path, text)


def test_a_missing_file_and_an_unknown_purpose_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such recipe"):
        read_recipe(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="unknown purpose 'chatt'; did you mean 'chat'"):
        read(tmp_path, GOOD, purpose="chatt")


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    secret = "hf_SECRET"
    text = GOOD + f"hf_hub_token: {secret}\nswanlab_api_key: {secret}\nmy_token: {secret}\npush_to_hub: 1\n"
    _, notes = read(tmp_path, GOOD + f"hf_hub_token: {secret}\n", f"swanlab_api_key={secret}")
    assert len(notes) == 2 and secret not in str(notes)
    with pytest.raises(InvalidValueError) as caught:
        read(tmp_path, text, f"om_hub_token=[{secret}")
    assert secret not in str(caught.value) and "my_token: ***: no such key" in str(caught.value)


def test_yaml_that_would_run_code_runs_nothing(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    text = GOOD + f"publish: !!python/object/apply:os.system ['touch {canary}']\n"
    with pytest.raises(InvalidValueError, match=r"recipe.yaml:4: publish: the tag .* is not allowed"):
        read(tmp_path, text)
    assert not canary.exists()


def test_a_recipe_can_be_changed_and_written_out(tmp_path: Path) -> None:
    recipe, _ = read(tmp_path, SECOND_GENERATION)
    changed = dataclasses.replace(recipe, seed=7)
    assert changed != recipe and changed.where("template") == recipe.where("template")
    assert dataclasses.asdict(changed)["kt_config"]["num_threads"] == 96


def test_the_dataset_directory_is_also_looked_for_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    assert read(tmp_path, GOOD + "dataset_dir: rows\n")[0].dataset_dir == tmp_path / "rows"
    assert read(tmp_path, GOOD + "dataset_dir: none\n")[0].dataset_dir == Path("none")


def test_the_shipped_recipes_are_read_without_a_problem() -> None:
    from importlib.resources import as_file, files

    with as_file(files("kt_runtime").joinpath("configs", "recipes")) as directory:
        paths = sorted(directory.glob("*.yaml"))
        assert paths
        for path in paths:
            read_recipe(path)


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.dates()
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
_KEYS = st.sampled_from(sorted(KNOWN)) | st.text(max_size=12)
_FUZZ = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@_FUZZ
@given(content=st.dictionaries(_KEYS, _VALUES, max_size=12), purpose=st.sampled_from(["train", "chat", "predict"]))
def test_any_values_of_known_keys_end_in_a_recipe_or_a_user_error(
    tmp_path: Path, content: dict[str, object], purpose: str
) -> None:
    base = yaml.safe_load(GOOD)
    try:
        read(tmp_path, yaml.safe_dump({**base, **content}, allow_unicode=True), purpose=purpose)
    except UserError as error:
        assert str(error)


@_FUZZ
@given(text=st.binary(max_size=200) | st.text(max_size=200), overrides=st.lists(st.text(max_size=30), max_size=3))
def test_any_bytes_and_overrides_end_in_a_recipe_or_a_user_error(
    tmp_path: Path, text: bytes | str, overrides: list[str]
) -> None:
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    for content in (data, GOOD.encode() + data):
        try:
            read(tmp_path, content, *overrides)
        except UserError as error:
            assert str(error)
