"""The trainer's share of the prefix cache, on a real server: DPO's reference from the serving path, and answers."""

from __future__ import annotations

import json
import math
import random
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from reference import lora
from system.forked_server import start_command

from kt_runtime.cli.connection import ServerAPI, resident_client
from kt_runtime.cli.main import main
from kt_runtime.cli.server_process import server
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.train.predict.run import read_rows
from kt_runtime.train.recipe import read_recipe
from kt_runtime.train.render.rendering import Renderer

PAIRS, PROMPTS, AT_ONCE = 200, 10, 2
WORDS = ("boat", "mara", "cliff", "light", "tide", "rope", "lamp", "keeper", "harbour", "wind", "stone", "gull")
RUN_SECONDS = 300
LOG_2 = 0.693147


@dataclass
class Place:
    """A float32 server with pages of one token, and a recipe for its model."""

    api: ServerAPI
    model: Path
    directory: Path

    def arguments(self, command: str, *overrides: str) -> list[str]:
        paths = [f"model_name_or_path={self.model}", f"output_dir={self.directory / 'out'}"]
        paths += [f"dataset_dir={self.directory}", "overwrite_output_dir=true"]
        return [command, "--recipe", str(self.directory / "r.yaml"), "--url", self.api.url, *paths, *overrides]

    def losses(self) -> list[float]:
        state = json.loads((self.directory / "out" / "trainer_state.json").read_text())
        return [entry["loss"] for entry in state["log_history"] if "loss" in entry]

    def adapter(self) -> Path:
        config = json.loads((self.model / "config.json").read_text())
        return lora.write_adapter(self.directory / "adapter", lora.random_adapter(config, rank=4, alpha=8.0, seed=5))

    def adapters(self) -> list[str]:
        return [each["name"] for each in self.api.get("/kt/adapters")["adapters"] if each["current"]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("tiny-qwen3-moe", tmp_path_factory.mktemp("model") / "model", seed=5)


@pytest.fixture(scope="module")
def api(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerAPI]:
    place = tmp_path_factory.mktemp("server")
    options = ["--dtype", "float32", "--adapter-dir", str(place / "adapters"), "--max-total-tokens", "16384"]
    with server(str(model), options, place / "server.log") as started:
        yield started


@pytest.fixture
def place(api: ServerAPI, model: Path, tmp_path: Path) -> Place:
    """The questions are others in each test: none finds the prefixes of another in the cache."""
    chance = random.Random(tmp_path.name)

    def text(count: int) -> str:
        return " ".join(chance.choice(WORDS) for _ in range(count))

    questions = [f"{text(30)} {number}?" for number in range(PROMPTS)]
    pairs = [
        {"instruction": questions[number % PROMPTS], "chosen": f"Yes, {number}.", "rejected": f"No, {number}."}
        for number in range(PAIRS)
    ]
    system = text(40)
    rows = [{"instruction": question, "output": "Yes.", "system": system} for question in questions]
    columns = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    asked = {"prompt": "instruction", "response": "output", "system": "system"}
    info = {
        "pairs": {"file_name": "pairs.json", "ranking": True, "columns": columns},
        "rows": {"file_name": "rows.json", "columns": asked},
    }
    for name, value in {"pairs.json": pairs, "rows.json": rows, "dataset_info.json": info}.items():
        (tmp_path / name).write_text(json.dumps(value))
    (tmp_path / "r.yaml").write_text(
        "lora_rank: 4\ncutoff_len: 1024\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n"
        "learning_rate: 1e-4\nlogging_steps: 1\n"
    )
    return Place(api, model, tmp_path)


def figures(said: str, pattern: str) -> list[float]:
    """The numbers in the one line of `said` that has the pattern's groups."""
    found = re.findall(pattern, said)
    assert len(found) == 1, said
    return [float(number.replace(",", "")) for number in found[0]]


DPO = ("stage=dpo", "dataset=pairs", "ref_logprobs=serving")
PASS = (
    r"reference from the serving path in .* s: ([\d,]+) pairs over ([\d,]+) prompts, ([\d,]+) answers asked for: "
    r"([\d,]+) tokens sent, ([\d,]+) from the prefix cache, ([\d,]+) computed; the prompts have ([\d,]+) tokens before "
    r"their last, of which ([\d,]+) were computed"
)
DEVIATION = (
    r"on the first (\d+) pairs, serving path against twin: a token's log-probability differs by at most (\S+) nats, in "
    r"the mean by (\S+); an answer's sum by at most (\S+), in the mean by (\S+); the mean loss of these pairs is (\S+) "
    r"with the twin's, (\S+) with the serving path's"
)


def test_many_pairs_over_few_prompts_compute_each_prompts_prefix_once(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(place.arguments("train", *DPO, "num_train_epochs=1")) == 0
    said = capsys.readouterr().out
    pairs, prompts, answers, sent, cached, computed, prefixes, prefixes_computed = figures(said, PASS)
    assert (pairs, prompts, answers) == (PAIRS, PROMPTS, 2 * PAIRS)
    assert sent == cached + computed and cached > 0.7 * sent
    # The template's beginning, which all prompts share, is computed once for all of them, at most once for each.
    assert 0.8 * prefixes < prefixes_computed <= prefixes
    compared, token_most, token_mean, answer_most, answer_mean, on_twin, on_serving = figures(said, DEVIATION)
    assert compared == 8 and token_mean == token_most == answer_mean == answer_most == 0
    assert on_twin == on_serving == LOG_2
    assert len(place.losses()) == PAIRS / 8 and place.losses()[0] == pytest.approx(math.log(2), abs=1e-6)  # 1.5e-7


def test_the_twins_values_and_the_serving_paths_train_alike(place: Place) -> None:
    short = ("num_train_epochs=1", "max_samples=40", "learning_rate=5e-3")
    assert main(place.arguments("train", *DPO, *short)) == 0
    served = place.losses()
    assert main(place.arguments("train", *DPO, *short, "ref_logprobs=twin")) == 0
    assert served == place.losses() and max(served) - min(served) > 1e-3


@pytest.mark.parametrize("key", ["adapter_name_or_path", "ref_model_adapters"])
def test_the_references_adapter_is_served_meanwhile(place: Place, capsys: pytest.CaptureFixture[str], key: str) -> None:
    assert main(place.arguments("train", *DPO, "max_steps=2", f"{key}={place.adapter()}")) == 0
    said = capsys.readouterr().out
    assert "meanwhile" in said and place.adapters() == []
    _, token_most, _, _, _, on_twin, on_serving = figures(said, DEVIATION)
    assert token_most == 0 and on_serving == on_twin
    is_policy = key == "adapter_name_or_path"  # else the base with the policy's adapter, which adds nothing yet
    assert (on_twin == LOG_2) == is_policy


def test_ctrl_c_in_the_pass_leaves_neither_session_nor_adapter(place: Place) -> None:
    arguments = place.arguments("train", *DPO, f"ref_model_adapters={place.adapter()}")
    trainer = start_command(arguments)
    assert trainer.stdout is not None
    read_until(trainer.stdout, "meanwhile")
    trainer.send_signal(signal.SIGINT)
    said, _ = trainer.communicate(timeout=RUN_SECONDS)
    assert trainer.returncode == 130 and "interrupted before the first step: nothing to save" in said, said
    assert place.adapters() == []
    with resident_client(place.api) as client:
        assert client.status().sessions == []


def read_until(lines: Iterator[str], wanted: str) -> None:
    before = []
    for line in lines:
        before.append(line)
        if wanted in line:
            return
    raise AssertionError(f"ended before it said {wanted!r}:\n{''.join(before)}")


@pytest.mark.parametrize("command", ["predict", "train"])
def test_answers_use_the_prefix_cache(place: Place, capsys: pytest.CaptureFixture[str], command: str) -> None:
    """`predict`, and `do_predict` with `predict_with_generate` after training."""
    keys = ["dataset=rows", "eval_dataset=rows", "do_predict=true", "predict_with_generate=true", "do_sample=false"]
    keys += [
        "max_new_tokens=4",
        f"per_device_eval_batch_size={AT_ONCE}",
        "max_steps=1",
        f"do_train={str(command == 'train').lower()}",
    ]
    assert main(place.arguments(command, *keys)) == 0
    said = capsys.readouterr().out
    sent, cached = figures(said, r"([\d,]+) prompt tokens sent, ([\d,]+) of them from the server's prefix cache")
    recipe = read_recipe(place.directory / "r.yaml", place.arguments("predict", *keys)[5:], purpose="predict")[0]
    renderer = Renderer(place.model, recipe)
    prompts = [row.ids.tolist() for row in read_rows(recipe, renderer, print)]
    assert sent == sum(map(len, prompts))
    shared = next(number for number, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    assert shared > 50 and (PROMPTS - AT_ONCE) * shared <= cached < sent
