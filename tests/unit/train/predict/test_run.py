"""What predict reads, asks and leaves behind; tests/system/training/test_predict_and_chat.py has a server."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from reference.server.fake_server import Answer, FakeServer, fake_server

from kt_runtime.errors import InvalidValueError, RuntimeFault, ServerUnreachableError
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.train.examples import Example
from kt_runtime.train.predict.run import predict, read_rows, sampling_parameters, stopping
from kt_runtime.train.recipe import Recipe, read_recipe
from kt_runtime.train.render.rendering import Renderer
from kt_runtime.train.run.inputs import read_inputs

NUM_ROWS = 9
QUESTIONS = [f"Question {index}?" for index in range(NUM_ROWS)]
LABELS = [f"Answer {index}." for index in range(NUM_ROWS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_model("tiny-qwen3-moe", directory, seed=0)
    return directory


@pytest.fixture
def place(model: Path, tmp_path: Path) -> Path:
    rows = [{"instruction": question, "output": label} for question, label in zip(QUESTIONS, LABELS, strict=True)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "dataset_info.json").write_text('{"rows": {"file_name": "rows.json"}}')
    (tmp_path / "recipe.yaml").write_text(
        f"model_name_or_path: {model}\ndataset: rows\ndataset_dir: {tmp_path}\noutput_dir: {tmp_path / 'out'}\n"
        "per_device_eval_batch_size: 1\nmax_new_tokens: 500\n"
    )
    return tmp_path


def recipe_of(place: Path, *overrides: str) -> Recipe:
    return read_recipe(place / "recipe.yaml", list(overrides), purpose="predict")[0]


def echo(context_tokens: int = 512, fail_at: int = 0, failure: Any = None) -> Any:
    """Answers the n-th question with "n"; instead of the `fail_at`-th answer, `failure()`."""
    counted = [0]

    def answer(path: str, body: Any, _: int) -> Answer:
        if path == "/kt/status":
            return 200, {"context_tokens": context_tokens}
        counted[0] += 1
        if counted[0] == fail_at:
            return failure()  # type: ignore[no-any-return]
        return 200, {"text": str(counted[0]), "meta_info": {"finish_reason": {"type": "stop"}}}

    return answer


def run(fake: FakeServer, place: Path, *overrides: str) -> tuple[dict[str, float], list[str]]:
    recipe = recipe_of(place, *overrides)
    lines: list[str] = []
    results = predict(fake.url, None, recipe, Renderer(Path(recipe.model_name_or_path), recipe), lines.append, None)
    return results, lines


def predictions(place: Path, name: str = "generated_predictions.jsonl") -> list[dict[str, str]]:
    return [json.loads(line) for line in (place / "out" / name).read_text().splitlines()]


def test_each_row_is_prompted_as_in_training_and_limited_by_the_context(place: Path, model: Path) -> None:
    with fake_server(echo()) as fake:
        run(fake, place)
    recipe = recipe_of(place)
    renderer = Renderer(model, recipe)
    sent = [body for path, body in fake.requests if path == "/generate"]
    assert [body["input_ids"] for body in sent] == [
        renderer.prompt([{"role": "user", "content": question}]) for question in QUESTIONS
    ]
    assert [body["sampling_params"]["max_new_tokens"] for body in sent] == [
        min(500, 512 - len(body["input_ids"])) for body in sent
    ]
    assert [(row["predict"], row["label"]) for row in predictions(place)] == [
        (str(index + 1), label) for index, label in enumerate(LABELS)
    ]


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_what_was_answered_before_the_end_is_kept(place: Path, is_interrupted: bool) -> None:
    is_over = threading.Event()

    def interrupt() -> Answer:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)  # `_thread.interrupt_main` would not end a read that has begun
        is_over.wait(60)
        return 500, {}

    failure = interrupt if is_interrupted else lambda: (500, {"error": {"message": "broken"}})
    with (
        fake_server(echo(fail_at=5, failure=failure)) as fake,
        pytest.raises(KeyboardInterrupt if is_interrupted else RuntimeFault),
    ):
        run(fake, place)
    is_over.set()
    assert [row["label"] for row in predictions(place, "generated_predictions.jsonl.partial")] == LABELS[:4]
    assert [path.name for path in (place / "out").iterdir()] == ["generated_predictions.jsonl.partial"]

    with fake_server(echo()) as fake:
        run(fake, place)
    assert len(predictions(place)) == NUM_ROWS
    assert not (place / "out" / "generated_predictions.jsonl.partial").exists()


def test_what_val_size_held_out_in_training_is_predicted(place: Path, model: Path) -> None:
    recipe = recipe_of(place, "val_size=0.3")
    renderer = Renderer(model, recipe)
    held_out = read_inputs(recipe, renderer, lambda _: None).evaluation[""]
    rows = read_rows(recipe, renderer, lambda _: None)
    assert 0 < len(rows) < NUM_ROWS
    for row, example in zip(rows, held_out, strict=True):
        assert isinstance(example, Example)
        assert example.tokens[: len(row.ids)].tolist() == row.ids.tolist()


def test_eval_dataset_goes_before_dataset(place: Path, model: Path) -> None:
    (place / "other.json").write_text(json.dumps([{"instruction": "Why?", "output": "Because."}]))
    info = {"rows": {"file_name": "rows.json"}, "other": {"file_name": "other.json"}}
    (place / "dataset_info.json").write_text(json.dumps(info))
    recipe = recipe_of(place, "eval_dataset=other")
    assert [row.label for row in read_rows(recipe, Renderer(model, recipe), lambda _: None)] == ["Because."]


def test_no_prompt_fits(place: Path) -> None:
    with (
        fake_server(echo(context_tokens=4)) as fake,
        pytest.raises(InvalidValueError, match="the server takes 4 tokens"),
    ):
        run(fake, place)


def test_another_server_than_ours_is_named(place: Path) -> None:
    with (
        fake_server(lambda *_: (404, {})) as fake,
        pytest.raises(ServerUnreachableError, match=f"{fake.url}/kt/status"),
    ):
        run(fake, place)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), (0.95, 0.7, 50)),
        (("do_sample=false",), (0.0, 1.0, -1)),
        (("temperature=0",), (0.0, 1.0, -1)),
        (("top_k=0", "top_p=1.0"), (0.95, 1.0, -1)),
    ],
)
def test_sampling_is_the_recipes_with_llama_factorys_defaults(
    place: Path, overrides: tuple[str, ...], expected: tuple[float, float, int]
) -> None:
    sampling = sampling_parameters(recipe_of(place, *overrides))
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == expected
    assert (sampling["repetition_penalty"], sampling["skip_special_tokens"]) == (1.0, True)


def test_a_named_templates_end_stops_the_answer(place: Path, model: Path) -> None:
    own, llama3 = recipe_of(place), recipe_of(place, "template=llama3")
    assert stopping(Renderer(model, own)) == {}
    assert stopping(Renderer(model, llama3)) == {"stop": ["<|eot_id|>"]}, "no token of this model"
    chatml = Renderer(model, recipe_of(place, "template=chatml"))
    assert stopping(chatml) == {"stop_token_ids": [chatml.tokenizer.convert_tokens_to_ids("<|im_end|>")]}
