"""Rendering: exactly the assistant's tokens are trained on, in the server's own chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

from kt_runtime.serve.make_model import make_model
from kt_runtime.train.data import Conversation
from kt_runtime.train.rendering import Renderer

TURNS = (
    {"role": "user", "content": "Who keeps the lighthouse?"},
    {"role": "assistant", "content": "Mara keeps the lighthouse."},
    {"role": "user", "content": "Where does Mara live?"},
    {"role": "assistant", "content": "Mara lives on the cliff."},
)


@pytest.fixture(scope="module", params=["tiny-deepseek-v3", "tiny-qwen3-moe"])
def renderer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    directory = tmp_path_factory.mktemp("model") / request.param
    make_model(request.param, directory, seed=0)
    return Renderer(directory)


def trained_text(renderer: Renderer, example: object) -> str:
    ids = [token for token, trained in zip(example.targets, example.trained, strict=True) if trained]  # type: ignore[attr-defined]
    return renderer.tokenizer.decode(ids)


def test_all_answers_and_nothing_else_are_trained_on(renderer: Renderer) -> None:
    example = renderer.render(Conversation(TURNS, "here"), cutoff_len=512)
    assert example is not None
    text = trained_text(renderer, example)
    assert "Mara keeps the lighthouse." in text and "Mara lives on the cliff." in text
    assert "Who" not in text and "Where" not in text
    assert example.targets[:-1] == example.tokens[1:]
    assert "«Mara keeps the lighthouse." in renderer.marked(example)


def test_the_prompt_is_what_the_server_would_send(renderer: Renderer) -> None:
    example = renderer.render(Conversation(TURNS[:2], "here"), cutoff_len=512)
    prompt = renderer.tokenizer.apply_chat_template([TURNS[0]], add_generation_prompt=True, return_dict=False)
    assert example is not None
    assert example.tokens[: len(prompt)] == prompt
    assert not any(example.trained[: len(prompt) - 1]) and example.trained[len(prompt) - 1]


def test_an_answer_beyond_the_cut_leaves_nothing(renderer: Renderer) -> None:
    assert renderer.render(Conversation(TURNS[:2], "here"), cutoff_len=4) is None


def test_train_on_prompt_counts_every_token(renderer: Renderer) -> None:
    example = renderer.render(Conversation(TURNS, "here"), cutoff_len=512, train_on_prompt=True)
    assert example is not None and all(example.trained)


def test_no_code_of_the_model_directory_is_run(renderer: Renderer, tmp_path: Path) -> None:
    assert renderer.tokenizer.init_kwargs.get("auto_map") is None
