"""`kt-runtime train` without a server: what is said, and refused, before one would be started."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.cases import choose
from reference.families import PRESETS
from reference.server.fake_server import fake_server

from kt_runtime.adapters import AdapterTensors, write_peft_directory
from kt_runtime.cli.adapter import place as adapter_place
from kt_runtime.cli.connection import ServerAPI
from kt_runtime.cli.main import main
from kt_runtime.cli.train import command as train
from kt_runtime.cli.train import run_server, starting_adapter
from kt_runtime.errors import ConflictError
from kt_runtime.families import family_for, resolve_targets
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.presets import load_preset
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.run.loop import RunResult
from kt_runtime.wire.replies import PublishReply

CONFIG = load_preset("tiny-deepseek-v3").config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("tiny-deepseek-v3", tmp_path_factory.mktemp("model") / "model", seed=1)


@pytest.fixture
def check(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `train --check` on a small recipe; returns the exit status and everything that was printed."""
    monkeypatch.setenv("KT_RUNTIME_URL", "http://127.0.0.1:9")
    (tmp_path / "dataset_info.json").write_text('{"d": {"file_name": "d.json"}}')
    rows = [{"instruction": f"What is {number}?", "output": f"A number, {number}."} for number in range(6)]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    recipe = tmp_path / "r.yaml"

    def run(*overrides: str, text: str = "") -> tuple[int, str]:
        recipe.write_text(
            f"model_name_or_path: {model}\ndataset: d\ndataset_dir: {tmp_path}\noutput_dir: {tmp_path}/out\n"
            f"per_device_train_batch_size: 2\nlearning_rate: 1e-4\nnum_train_epochs: 2\n{text}"
        )
        status = main(["train", "--check", "--recipe", str(recipe), *overrides])
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


def write_adapter(path: Path, targets: list[str], rank: int = 4, drop: str = "") -> Path:
    modules = [module for module in resolve_targets(CONFIG, targets) if module.name != drop]
    generator = torch.Generator().manual_seed(1)
    pairs = {}
    for module in modules:
        experts = (module.num_experts,) if module.num_experts else ()
        a = torch.randn(*experts, rank, module.in_features, generator=generator)
        pairs[module.name] = (a, torch.randn(*experts, module.out_features, rank, generator=generator))
    adapter = AdapterTensors.from_modules(rank, 8.0, pairs)
    write_peft_directory(path, adapter, family_for(CONFIG), CONFIG, max_rank=64)
    return path


def test_check_prints_the_plan_and_changes_nothing(check: Any, tmp_path: Path) -> None:
    status, said = check()
    assert status == 0, said
    for text in (
        "6 examples; the first, trained tokens between «»",
        "6 optimizer steps of 2 x 1 sequences (2.00 epochs of 3 steps)",
        "would train 121,728 parameters in 30 modules at rank 8:",
        "model.layers.{1-2}.mlp.experts.{gate_proj,up_proj,down_proj}",
        "would begin at step 0",
        "nothing was started or changed",
    ):
        assert text in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "family", choose(few=["gpt_oss", "qwen3_5_moe_text"], usual=list(PRESETS), every=list(PRESETS))
)
def test_check_plans_the_routed_experts_of_every_family(check: Any, tmp_path: Path, family: str) -> None:
    model = make_model(PRESETS[family], tmp_path / "model")
    status, said = check(f"model_name_or_path={model}", text="lora_target: experts\n")
    assert status == 0, said
    config = json.loads((model / "config.json").read_text())
    projections = len(resolve_targets(config, ["experts"]))
    assert re.search(rf"would train [\d,]+ parameters in {projections} modules at rank 8:", said), said
    assert ".experts.{gate_proj,up_proj,down_proj}" in said and "nothing was started or changed" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lora_target: q_prj\n", r"r.yaml:8: lora_target: unknown LoRA target 'q_prj'; did you mean"),
        ("report_to: wandbb\n", "wandbb"),
        ("adapter_name_or_path: /no/such\n", "r.yaml:8: adapter_name_or_path"),
        ("cutoff_len: 3\n", "cutoff_len: 3"),
    ],
)
def test_what_would_stop_a_run_is_said_with_its_line(check: Any, text: str, message: str) -> None:
    status, said = check(text=text)
    assert status == 2 and message in said, said


def test_sharegpt_rows_with_tools_are_rendered_in_a_named_template(check: Any, tmp_path: Path) -> None:
    call = {"from": "function_call", "value": '{"name": "tide", "arguments": {"day": 1}}'}
    turns = [{"from": "human", "value": "When?"}, call, {"from": "observation", "value": "7"}]
    tools = json.dumps([{"name": "tide", "description": "When?", "parameters": {"properties": {"day": {}}}}])
    row = {"conversations": [*turns, {"from": "gpt", "value": "At seven."}], "tools": tools}
    status, said = check("dataset=s", "template=deepseek3", f"dataset_dir={_sharegpt(tmp_path, [row] * 2)}")
    assert status == 0, said
    assert "> Tool Name: tide" in said and '«Action: tide\nAction Input: {"day": 1}' in said and "«At seven." in said


def test_rows_that_are_cut_are_named_with_how_much(check: Any, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "When?"}, {"from": "gpt", "value": "At seven. " * 50}]
    place = _sharegpt(tmp_path, [{"conversations": turns}] * 7)
    status, said = check("dataset=s", "cutoff_len=32", f"dataset_dir={place}")
    assert status == 0 and "7 of 7 rows are longer than cutoff_len=32 tokens, and cut there: " in said, said
    assert f"{place}/s.jsonl:5 by " in said and f"{place}/s.jsonl:6" not in said and "and 2 more" in said


def _sharegpt(place: Path, rows: list[Any]) -> Path:
    (place / "s").mkdir()
    (place / "s" / "dataset_info.json").write_text('{"s": {"file_name": "s.jsonl", "formatting": "sharegpt"}}')
    (place / "s" / "s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place / "s"


def test_a_starting_adapter_is_read_whole_and_its_settings_hold(check: Any, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", ["attention", "experts"])
    status, said = check(text=f"adapter_name_or_path: {adapter}\n")
    assert status == 0, said
    assert f"starts from the adapter {adapter}: rank 4, alpha 8, targets attention, experts" in said
    assert "in 21 modules at rank 4" in said
    assert "rank 4, alpha 8," in check(text=f"adapter_name_or_path: {adapter}\nlora_alpha: null\n")[1]
    status, said = check(text=f"adapter_name_or_path: {adapter}\nlora_rank: 16\n")
    assert status == 2 and "r.yaml:9: lora_rank: 16: training starts from the adapter" in said
    (adapter / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    status, said = check(text=f"adapter_name_or_path: {adapter}\n")
    assert status == 2 and "adapter_model.safetensors" in said


@pytest.mark.parametrize("targets", ["all", "attention", "mlp,shared", "experts", "q_a_proj,kv_a_proj_with_mqa"])
def test_an_adapters_modules_are_named_as_targets(targets: str, tmp_path: Path) -> None:
    names = targets.split(",")
    adapter = starting_adapter._read(write_adapter(tmp_path / "a", names), CONFIG, 64)
    assert set(starting_adapter.targets_of(adapter, CONFIG, "a")) == set(names)


def test_an_adapter_of_some_layers_needs_a_target_in_the_recipe(tmp_path: Path) -> None:
    place = write_adapter(tmp_path / "a", ["o_proj"], drop="model.layers.1.self_attn.o_proj")
    adapter = starting_adapter._read(place, CONFIG, 64)
    with pytest.raises(ConflictError, match=r"adapts model.layers.0.self_attn.o_proj, but not every module"):
        starting_adapter.targets_of(adapter, CONFIG, "a")


def test_a_recipe_without_an_adapter_stays_as_it_is(tmp_path: Path) -> None:
    recipe = Recipe(model_name_or_path="m")
    assert starting_adapter.with_starting_adapter(recipe, CONFIG, None, print) is recipe


def test_a_run_that_would_be_resumed_is_named(check: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "adapter_model.safetensors").write_bytes(b"")
    status, said = check()
    assert status == 2 and "overwrite_output_dir: true to start over" in said
    status, said = check("overwrite_output_dir=true")
    assert status == 0 and "(replacing what is there)" in said


def test_what_is_wrong_with_output_and_placement_is_said_before_a_server_starts(check: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, said = check(f"output_dir={tmp_path}/file/out")
    assert status == 2 and "output_dir: " in said and f"{tmp_path}/file is not a directory" in said
    status, said = check(f"kt_optimize_rule={tmp_path}/file")
    assert status == 2 and f"{tmp_path}/file: is empty" in said
    status, said = check("--url", "http://127.0.0.1:9")
    assert status == 1 and "no server answers there" in said


def test_a_schedule_that_follows_evaluations_and_a_run_without_end_can_be_checked(check: Any) -> None:
    status, said = check("lr_scheduler_type=reduce_lr_on_plateau", "val_size=2", "eval_strategy=epoch")
    assert status == 0 and "reduce_lr_on_plateau: first 1.00e-04, then as evaluations say" in said
    status, said = check("max_steps=1000000000000", "warmup_steps=10")
    assert status == 0 and "first 0.00e+00, highest 1.00e-04, last 1.00e-16" in said


def test_shares_of_steps_are_said_as_steps(check: Any) -> None:
    status, said = check(
        "logging_steps=0.3", "save_strategy=best", "val_size=2", "eval_strategy=steps", "eval_steps=0.5"
    )
    assert status == 0 and "would log every 2 steps, save each best evaluation, evaluate every 2 steps" in said, said
    assert "would log every 500 steps, save every 2 steps, evaluate never" in check("save_steps=0.3")[1]


def test_a_recipe_that_only_predicts_is_checked_as_predict_reads_it(check: Any, tmp_path: Path) -> None:
    only = "do_predict: true\npredict_with_generate: true\n"
    status, said = check(text=f"{only}eval_dataset: d\n")
    assert status == 0, said
    assert (
        f"would ask the base model for 6 answers, of a server started for it, and write them to {tmp_path}/out" in said
    )
    assert "nothing was started or changed" in said and not (tmp_path / "out").exists()
    status, said = check(text=f"{only}val_size: 2\nadapter_name_or_path: {write_adapter(tmp_path / 'a', ['o_proj'])}\n")
    assert status == 0 and f"would ask the adapter {tmp_path}/a for 2 answers" in said, said
    status, said = check("--url", "http://127.0.0.1:9", text=f"{only}eval_dataset: d\n")
    assert status == 1 and "no server answers there" in said


RULES = """\
- match: {name: "mlp.experts$"}
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs: {generate_device: cpu, generate_op: KSFTExpertsCPU, backend: AMXInt8}
"""


def test_a_server_started_for_the_run_takes_the_recipes_placement(
    check: Any, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    status, said = check(text="kt_optimize_rule: rules.yaml\n")
    assert status == 0 and f"one would be started for the run with --placement {rules}" in said, said
    started: list[list[str]] = []

    @contextlib.contextmanager
    def no_server(model: str, arguments: list[str], log: Path, **_: Any) -> Any:
        started.append(arguments)
        yield

    monkeypatch.setattr(run_server, "server", no_server)
    with run_server.running_server(str(model), None, None, lambda _: None, max_lora_rank=32, placement=rules):
        pass
    assert started == [["--max-lora-rank", "32", "--placement", str(rules)]]
    with run_server.running_server(str(model), None, None, lambda _: None, keeps_routes=True):
        pass
    assert started[1] == ["--max-lora-rank", "16", "--routing-replay", "256MiB"]
    rules.write_text(RULES.replace("mlp.experts", "mlp.exprts"))
    status, said = check(text="kt_optimize_rule: rules.yaml\n")
    assert status == 2 and "rules.yaml:1" in said and "mlp.exprts" in said, said


def test_where_a_server_of_the_runs_own_has_put_its_adapter_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = PublishReply(request_id="", name="mine", version="a" * 64, lora_id="l", publish_ms=1.0)
    said: list[str] = []
    monkeypatch.setattr(adapter_place, "WRITING_SECONDS", 0.2)
    with fake_server(lambda *_: (200, {"adapter_directory": str(tmp_path)})) as fake:
        api = ServerAPI(fake.url)
        train.say_where_published(api, published, "tiny", said.append)
        (tmp_path / "mine" / published.version).mkdir(parents=True)
        train.say_where_published(api, published, "tiny", said.append)
    lost, line = said
    assert f"was not written to {tmp_path}/mine/" in lost
    assert f"mine is in {tmp_path}/mine/{published.version}, and the next `kt-runtime serve --model tiny`" in line


def test_the_line_that_resumes_repeats_no_secret(tmp_path: Path) -> None:
    result = RunResult(3, 1.0, 1.0, 0.0, "out/checkpoint-3", None, interrupted=True)
    said: list[str] = []
    overrides = ("hf_hub_token=hf_x", "seed=3", "resume_from_checkpoint=old")
    train._say_how_to_resume(result, Recipe(model_name_or_path="m"), Path("r.yaml"), overrides, None, said.append)
    assert said[-1].split("train ")[1] == "--recipe r.yaml seed=3 resume_from_checkpoint=out/checkpoint-3"
