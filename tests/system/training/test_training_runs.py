"""Training as users run it: every recipe of configs/recipes, resume, Ctrl-C, evaluation, publishing, servers."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import psutil
import pytest
import torch
from reference import lora
from reference.place import Place
from reference.server import signalled
from reference.server.command_line import run_command
from system.forked_server import ForkedCommand, processes, start_command
from transformers import AutoModelForCausalLM

from kt_runtime.adapters import read_adapter
from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.main import main
from kt_runtime.cli.server_process import server
from kt_runtime.families import family_for
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.presets import configs

RECIPES = Path(str(configs().joinpath("recipes")))
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
RUN_SECONDS = 300
COSINE = ["lr_scheduler_type=cosine"]
RULES = """\
- match: {name: "mlp.experts$"}
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs: {generate_device: cpu, generate_op: KSFTExpertsCPU, backend: AMXInt8}
"""

# Shorter than as written, so that each recipe's last step, checkpoint and evaluation come soon.
SHORTER = {
    "demo-identity": [
        "max_steps=3",
        "do_train=true",
        "do_predict=true",
        "predict_with_generate=true",
        "val_size=4",
        "max_new_tokens=8",
    ],
    "sft": ["max_steps=4", "eval_steps=2", "save_steps=2", "publish_every_steps=2", "publish=shorter"],
    "sft-resume": ["max_steps=3", "save_steps=2"],
    "grpo": ["max_steps=2", "num_generations=4"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("tiny-deepseek-v3", tmp_path_factory.mktemp("model") / "model", seed=5)


@pytest.fixture(scope="module")
def api(model: Path, tmp_path_factory: pytest.TempPathFactory, place: Place) -> Iterator[ServerAPI]:
    directory = tmp_path_factory.mktemp("server")
    arguments = place.arguments(["--adapter-dir", str(directory / "adapters")])
    with server(str(model), arguments, directory / "server.log") as started:
        yield started


@pytest.fixture
def command(api: ServerAPI, model: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """`command("sft", "seed=3")`: arguments of `kt-runtime` that train recipe sft into `tmp_path/out`."""

    def arguments(name: str, *overrides: str) -> list[str]:
        paths = [f"model_name_or_path={model}", f"output_dir={tmp_path / 'out'}"]
        return ["train", "--recipe", str(RECIPES / f"{name}.yaml"), "--url", api.url, *paths, *overrides]

    return arguments


def logged(path: Path, key: str = "loss") -> list[tuple[int, float]]:
    state = json.loads((path / "trainer_state.json").read_text())
    return [(entry["step"], entry[key]) for entry in state["log_history"] if key in entry]


def read_until(process: subprocess.Popen[str] | ForkedCommand, wanted: str) -> list[str]:
    """Lines up to the first that has `wanted`."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if wanted in line:
            return lines
    raise AssertionError(f"ended before it said {wanted!r}:\n{''.join(lines)}")


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_runs(
    command: Callable[..., list[str]],
    api: ServerAPI,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    status = main(command(name, *SHORTER.get(name, ["max_steps=2"])))
    said = capsys.readouterr()
    assert status == 0, said.out + said.err
    out = tmp_path / "out"
    for file in ("adapter_model.safetensors", "adapter_config.json", "train_results.json", "trainer_log.jsonl"):
        assert (out / file).is_file()
    assert all(loss == loss and abs(loss) < 1e4 for _, loss in logged(out)) and logged(out)
    with resident_client(api) as client:
        assert client.status().sessions == []
        assert client.load_adapter("run", str(out)).version  # whatever a run leaves can be served
    assert ("trained tokens between «»" in said.out) == (name != "grpo") and "training " in said.out
    if name.startswith("dpo"):
        assert {"rewards/accuracies", "rewards/margins", "logps/chosen"} <= _keys(out)
        assert ("reference: none" in said.out) == (name in ("dpo-orpo", "dpo-simpo"))
    if name == "seed-sft":
        assert "kt_optimize_rule" in said.out and "cpu_infer" in said.out and "the server: " in said.out
        assert (out / "training_loss.png").is_file()
    if name == "demo-identity":
        assert 0 <= json.loads((out / "predict_results.json").read_text())["predict_bleu-4"] <= 100
        assert len((out / "generated_predictions.jsonl").read_text().splitlines()) == 4
    if name == "sft":
        assert [step for step, _ in logged(out, "eval_loss")] == [2, 4]
        assert said.out.count("evaluation: ") == 2
        assert 0 <= json.loads((out / "eval_results.json").read_text())["eval_accuracy"] <= 1
        assert len(api.get("/kt/adapters/shorter")["versions"]) == 2
        assert (out / "training_eval_loss.png").is_file()


def _keys(out: Path) -> set[str]:
    state = json.loads((out / "trainer_state.json").read_text())
    return {key for entry in state["log_history"] for key in entry}


@pytest.mark.parametrize("name", ["sft-resume", "dpo"])
def test_a_run_that_was_killed_continues_with_the_losses_of_an_unbroken_one(
    command: Callable[..., list[str]], tmp_path: Path, name: str, place: Place
) -> None:
    settings = ["max_steps=9", "save_steps=3", "logging_steps=1", "save_total_limit=2", "eval_strategy=no"]
    assert main([*command(name, *settings), f"output_dir={tmp_path / 'whole'}"]) == 0
    killed = start_command(command(name, *settings), **signalled.after("step 5/9", signal.SIGKILL))
    read_until(killed, "step 5/9")
    killed.send_signal(signal.SIGKILL)  # on a GPU's server: there it is no fork
    killed.wait()
    again = run_command(*command(name, *settings), directory=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resumed" in again.stdout and "checkpoint-3 at step 3 of 9" in again.stdout
    for key in ("loss", "grad_norm", "learning_rate"):
        whole, out = (logged(tmp_path / run, key) for run in ("whole", "out"))
        assert [step for step, _ in whole] == [step for step, _ in out]
        place.check_losses([value for _, value in out], [value for _, value in whole])
    lines = [json.loads(line) for line in (tmp_path / "out" / "trainer_log.jsonl").read_text().splitlines()]
    assert [line["current_steps"] for line in lines if "loss" in line] == list(range(1, 10))
    files = [(tmp_path / run / "adapter_model.safetensors").read_bytes() for run in ("whole", "out")]
    assert files[0] == files[1] or not place.same_training
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-6", "checkpoint-9"]


def test_ctrl_c_saves_and_says_how_to_resume(command: Callable[..., list[str]], api: ServerAPI, tmp_path: Path) -> None:
    trainer = start_command(command("sft-resume", "max_steps=500", "overwrite_output_dir=true"))
    read_until(trainer, "step 3/500")
    trainer.send_signal(signal.SIGINT)
    said, _ = trainer.communicate(timeout=RUN_SECONDS)
    assert trainer.returncode == 130, said
    resumption = said.strip().splitlines()[-1].split()
    assert resumption[:2] == ["kt-runtime", "train"] and resumption[-1].startswith("resume_from_checkpoint=")
    with resident_client(api) as client:
        assert client.status().sessions == []  # the server is there still, and free of the run
    step = int(resumption[-1].rpartition("-")[2])
    assert main([*resumption[1:], f"max_steps={step + 2}"]) == 0
    assert [at for at, _ in logged(tmp_path / "out")] == list(range(1, step + 3))


def test_one_can_chat_with_the_adapter_while_it_learns(
    command: Callable[..., list[str]], api: ServerAPI, model: Path
) -> None:
    trainer = start_command(command("sft-resume", "max_steps=400", "publish=learning", "publish_every_steps=2"))
    read_until(trainer, "published learning")
    answered = 0
    versions: set[str] = set()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (answered < 5 or len(versions) < 2):
        versions.add(api.get("/kt/adapters/learning")["current"])
        messages = [{"role": "user", "content": "What is your name?"}]
        body = {"model": f"{_served(api)}:learning", "messages": messages, "max_tokens": 4, "temperature": 0}
        answered += len(api.post("/v1/chat/completions", body)["choices"])
    trainer.send_signal(signal.SIGINT)
    trainer.communicate(timeout=RUN_SECONDS)
    assert answered >= 5 and len(versions) >= 2


def _served(api: ServerAPI) -> str:
    return str(api.get("/v1/models")["data"][0]["id"])


def test_check_touches_nothing(
    command: Callable[..., list[str]], api: ServerAPI, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _settled_state(api)
    assert main([*command("dpo"), "--check"]) == 0
    said = capsys.readouterr().out
    for text in ("6 optimizer steps", "reference: the base model", "would train 121,728 parameters", "nothing was"):
        assert text in said
    assert _state(api) == before and not (tmp_path / "out").exists()


def _settled_state(api: ServerAPI) -> Any:
    """When what earlier tests began has ended and is on disk: it does not change any more."""
    deadline = time.monotonic() + RUN_SECONDS
    state = None
    while state != (state := _state(api)) or api.get("/kt/status")["not_stored"]:
        assert time.monotonic() < deadline, state
        time.sleep(1)
    return state


def _state(api: ServerAPI) -> Any:
    status = api.get("/kt/status")
    return status["sessions"], status["fingerprint"], api.get("/kt/adapters")


@pytest.mark.parametrize("options", [[], ["--check"]])
def test_a_recipe_for_another_model_is_refused(
    command: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    other = make_model("tiny-deepseek-v3", tmp_path / "other", seed=6)  # same architecture, other weights
    assert main([*command("dpo", f"model_name_or_path={other}"), *options]) == 2
    assert f"{other}: the server's resident model is" in capsys.readouterr().err


def test_going_on_with_an_adapter_takes_its_rank_and_compares_with_it(
    command: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], place: Place
) -> None:
    assert main(command("sft-turns", "max_steps=2")) == 0
    adapter = ["adapter_name_or_path=" + str(tmp_path / "out"), f"output_dir={tmp_path / 'dpo'}", "max_steps=2"]
    assert main([*command("dpo"), *adapter]) == 2
    assert "lora_rank: 8: training starts from the adapter" in capsys.readouterr().err
    recipe = tmp_path / "dpo.yaml"
    text = (RECIPES / "dpo.yaml").read_text().replace("lora_rank: 8\nlora_target: all\n", "")
    recipe.write_text(text.replace("../world", str(RECIPES.parent / "world")))
    arguments = command("dpo")
    arguments[arguments.index("--recipe") + 1] = str(recipe)
    assert main([*arguments, *adapter]) == 0
    said = capsys.readouterr().out
    assert "rank 4, alpha 8, targets attention" in said.replace("alpha 16", "alpha 8")
    assert "reference: the starting adapter" in said
    losses = logged(tmp_path / "dpo")
    assert losses[0][1] == pytest.approx(
        math.log(2), abs=max(3e-7, place.largest)
    )  # policy and reference are the same at first; 6.0e-9 measured with AVX-512, 3.9e-8 with AVX2


def test_the_best_is_saved_the_output_directory_resumed_and_its_adapter_asked(
    command: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    steps = ["val_size=4", "eval_strategy=steps", "eval_steps=0.5", "logging_steps=0.25", "save_strategy=best"]
    assert main(command("sft-resume", "max_steps=4", *steps, "lr_scheduler_kwargs.num_cycles=0.5", *COSINE)) == 0
    best = json.loads((out / "trainer_state.json").read_text())["best_global_step"]
    assert [at for at, _ in logged(out, "eval_loss")] == [2, 4] and [at for at, _ in logged(out)] == [1, 2, 3, 4]
    assert f"checkpoint-{best}" in {path.name for path in out.glob("checkpoint-*")} <= {"checkpoint-2", "checkpoint-4"}
    assert main(command("sft-resume", "max_steps=6", *steps, *COSINE, f"resume_from_checkpoint={out}")) == 0
    assert "resumed " in capsys.readouterr().out and [at for at, _ in logged(out)][-1] == 6
    others = [f"output_dir={tmp_path / 'other'}", f"adapter_name_or_path={out}", "val_size=4", "do_train=false"]
    assert main([*command("sft-resume"), *others, "do_eval=true"]) == 0
    assert not (tmp_path / "other" / "adapter_config.json").exists()
    answers = ["do_predict=true", "predict_with_generate=true", "max_new_tokens=4"]
    assert main([*command("sft-resume"), *others, *answers]) == 0
    results = json.loads((tmp_path / "other" / "all_results.json").read_text())
    assert {"eval_loss", "predict_bleu-4"} <= set(results) and f"serving {out} as" in capsys.readouterr().out


def test_experts_train_with_dropout_at_rank_32_and_peft_loads_all_that_the_run_leaves(
    command: Callable[..., list[str]], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As LLaMA-Factory's users type it: `train FILE key=value`. Compared with weights merged by hand in float32."""
    arguments = command("sft-resume", "lora_target=all", "lora_rank=32", "max_steps=3")
    arguments.remove("--recipe")
    assert main(arguments) == 0
    said, out = capsys.readouterr().out, tmp_path / "out"
    config = json.loads((model / "config.json").read_text())
    adapter = read_adapter(out, family_for(config), config, 32)
    total = sum(tensor.numel() for tensor in adapter.tensors.values())
    loads = "PEFT 0.21 with transformers 5 (PeftModel.from_pretrained)"
    assert f"{loads}: all {total:,} parameters" in said
    card = (out / "README.md").read_text()
    assert f"| {loads} | {total:,} of {total:,} |" in card and "the export refuses kv_b_proj" in card
    plain, merged = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval() for _ in range(2))
    tokens = torch.arange(2 * 16).reshape(2, 16) * 7 % config["vocab_size"]
    with torch.no_grad():
        base = plain(tokens).logits
        expected = lora.merge(merged, adapter)(tokens).logits
        wrapped: Any = peft.PeftModel.from_pretrained(plain, str(out))
        found = wrapped(tokens).logits
    loaded = [value for name, value in wrapped.named_parameters() if "lora_" in name]
    assert sum(int(value.count_nonzero()) for value in loaded) == sum(
        int(tensor.count_nonzero()) for tensor in adapter.tensors.values()
    )
    assert float((expected - base).abs().max()) > 1e-3
    torch.testing.assert_close(found, expected, rtol=0, atol=9e-6 * float(expected.abs().max()))  # 9.5e-7


def test_without_a_server_one_is_started_and_ended(model: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(RULES)
    arguments = ["train", "--recipe", str(RECIPES / "sft-resume.yaml"), f"model_name_or_path={model}"]
    placed = f"kt_optimize_rule={tmp_path / 'rules.yaml'}"
    arguments += [f"output_dir={tmp_path / 'out'}", "max_steps=500", placed]
    before = processes()
    trainer = start_command(arguments, KT_RUNTIME_URL="http://127.0.0.1:9")
    begun = "".join(read_until(trainer, "step 2/500"))
    assert f"its placement is that of {tmp_path / 'rules.yaml'}" in begun and "asks for int8" not in begun
    servers = {process for process in processes() - before if process.pid != trainer.pid}
    assert len(servers) >= 3
    trainer.send_signal(signal.SIGINT)
    said, _ = trainer.communicate(timeout=RUN_SECONDS)
    assert trainer.returncode == 130, said
    assert (tmp_path / "out" / "adapter_model.safetensors").exists() is False and "resume with:" in said
    _, alive = psutil.wait_procs(servers, timeout=30)
    assert alive == []
