"""Everything that is wrong with a recipe is told at once: keys, data, adapter, the server's limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reference.server.fake_server import fake_server

from kt_runtime.cli.main import main
from kt_runtime.serve.models.make_model import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("tiny-deepseek-v3", tmp_path_factory.mktemp("model") / "model", seed=1)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_RUNTIME_URL", "http://127.0.0.1:9")
    info = {
        "a": {"file_name": "a.jsonl"},
        "b": {"file_name": "b.jsonl"},
        "c": {"file_name": "c.jsonl", "ranking": True},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    good = json.dumps({"instruction": "What is 1?", "output": "One. " * 40})
    (tmp_path / "a.jsonl").write_text(f'{good}\n{{"instruction": 7, "output": "x"}}\n{{broken\n{good}\n"text"\n')
    (tmp_path / "b.jsonl").write_text(f'{good}\n{{"instrution": "x", "output": "y"}}\n')
    (tmp_path / "c.jsonl").write_text(f"{good}\n")
    return tmp_path


def told(place: Path, model: Path, text: str, capsys: pytest.CaptureFixture[str], *more: str) -> list[str]:
    """The lines of what `train --check` says against the recipe, without the place that all have in common."""
    recipe = place / "r.yaml"
    recipe.write_text(f"model_name_or_path: {model}\ndataset_dir: {place}\noutput_dir: {place}/out\n{text}")
    assert main(["train", str(recipe), "--check", *more]) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return said.err.replace(f"{place}/", "").splitlines()


def test_keys_data_and_model_are_told_in_one_pass(place: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "dataset: a,b,c,d\nlora_rnk: 8\nlearning_rate: fast\nlora_target: q_prj\ntemplate: deepsek3\n"
    first, *lines = told(place, model, f"{text}adapter_name_or_path: {place}/none\n", capsys)
    assert first == f"kt-runtime: r.yaml: {len(lines)} problems"
    expected = [
        "r.yaml:4: stage: sft: does not fit dataset 'c'",
        "r.yaml:5: lora_rnk: 8: no such key; did you mean lora_rank?",
        "r.yaml:6: learning_rate: 'fast'",
        "r.yaml:7: lora_target: unknown LoRA target 'q_prj'",
        "r.yaml:8: template: 'deepsek3'",
        "r.yaml:9: adapter_name_or_path: ",
        "a.jsonl:2: instruction: 7: must be text",
        "a.jsonl:3: ",
        "a.jsonl:5: a row must be a mapping",
        "b.jsonl:2: no column 'instruction'",
        "unknown dataset 'd'",
    ]
    for text in expected:
        number = text.removeprefix("r.yaml:4: ")  # the stage is at its default, and has no line
        assert sum(number in line for line in lines) == 1, (text, lines)
    assert len(lines) == len(expected), lines
    assert not (place / "out").exists()


def test_the_servers_limits_are_among_them(place: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = {"model": "m", "model_directory": str(model), "max_lora_rank": 4, "context_tokens": 64}

    def answer(path: str, *_: Any) -> Any:
        return 200, status if path == "/kt/status" else {}

    (place / "a.jsonl").write_text((place / "a.jsonl").read_text().splitlines()[0] + "\n")
    (place / "out").mkdir()
    (place / "out" / "train_results.json").write_text("{}")
    with fake_server(answer) as fake:
        lines = told(place, model, "dataset: a\nlora_rank: 8\ncutoff_len: 500\n", capsys, "--url", fake.url)
    assert lines[0] == "kt-runtime: r.yaml: 3 problems", lines
    assert "r.yaml:5: lora_rank: 8: the server serves adapters up to rank 4" in lines[1]
    assert "r.yaml:6: cutoff_len: 500: a.jsonl:1 has " in lines[2] and "context is 64" in lines[2]
    assert "holds train_results.json of an earlier run" in lines[3]


def test_one_problem_is_told_as_it_is(place: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "a.jsonl").write_text((place / "a.jsonl").read_text().splitlines()[0] + "\n")
    lines = told(place, model, "dataset: a\nlora_target: q_prj\n", capsys)
    assert len(lines) == 1 and lines[0].startswith("kt-runtime: r.yaml:5: lora_target: unknown LoRA target")


def test_of_a_dataset_with_many_problems_the_first_are_told(
    place: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "a.jsonl").write_text('{"instruction": 7, "output": "x"}\n' * 1000)
    lines = told(place, model, "dataset: a\n", capsys)[1:]
    assert len(lines) == 21 and "a.jsonl:20: instruction: 7" in lines[19]
    assert lines[20] == "  dataset a: there may be more; the first 20 problems are shown"
