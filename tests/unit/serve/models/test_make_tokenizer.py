from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.make_tokenizer import world_text, write_tokenizer
from kt_runtime.serve.models.presets import load_preset

DIALOGUE = [
    {"role": "user", "content": "Who keeps the lighthouse?"},
    {"role": "assistant", "content": "Mara keeps the lighthouse."},
]
RENDERED = {
    "tiny-deepseek-v3": (
        "<｜begin▁of▁sentence｜><｜User｜>Who keeps the lighthouse?<｜Assistant｜>",
        "Mara keeps the lighthouse.<｜end▁of▁sentence｜>",
    ),
    "tiny-qwen3-moe": (
        "<|im_start|>user\nWho keeps the lighthouse?<|im_end|>\n<|im_start|>assistant\n",
        "Mara keeps the lighthouse.<|im_end|>\n",
    ),
}


@pytest.fixture(scope="module", params=list(RENDERED))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(request.param, tmp_path_factory.mktemp("made") / request.param)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(checkpoint)


def test_chat_template_renders_the_familys_form(tokenizer: Any, checkpoint: Path) -> None:
    prompt, answer = RENDERED[checkpoint.name]
    assert tokenizer.apply_chat_template(DIALOGUE[:1], tokenize=False, add_generation_prompt=True) == prompt
    assert tokenizer.apply_chat_template(DIALOGUE, tokenize=False) == prompt + answer


def test_prompt_tokens_are_a_prefix_of_the_dialogues_tokens(tokenizer: Any) -> None:
    prompt = tokenizer.apply_chat_template(DIALOGUE[:1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(DIALOGUE, return_dict=False)
    assert whole[: len(prompt)] == prompt
    assert tokenizer.eos_token_id in whole[len(prompt) :]


def test_special_tokens_are_one_token_each_and_are_not_added_to_plain_text(tokenizer: Any, checkpoint: Path) -> None:
    prompt, _ = RENDERED[checkpoint.name]
    ids = tokenizer(prompt).input_ids
    assert tokenizer.decode(ids) == prompt
    assert ids == tokenizer(prompt, add_special_tokens=False).input_ids
    assert len(ids) <= 14


@pytest.mark.parametrize("text", ["Mara keeps the lighthouse.", "a  b\n\tc ", "Ünïcödé 東京 🙂", ""])
def test_any_text_survives(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_every_sentence_of_the_world_survives(tokenizer: Any) -> None:
    for sentence in world_text():
        assert tokenizer.decode(tokenizer(sentence).input_ids) == sentence


def test_too_large_a_vocabulary_is_refused_with_what_the_text_gives(tmp_path: Path) -> None:
    config = load_preset("tiny-qwen3-moe").config | {"vocab_size": 50_000}
    with pytest.raises(InvalidValueError, match=r"vocab_size is 50000, but the text in configs/world gives \d+ tokens"):
        write_tokenizer(tmp_path, config)


def test_ids_that_contradict_the_config_are_refused(tmp_path: Path) -> None:
    config = load_preset("tiny-qwen3-moe").config | {"eos_token_id": 5}
    with pytest.raises(InvalidValueError, match="eos_token_id is 5; must be 2"):
        write_tokenizer(tmp_path, config)
