"""The tokenizer of a made checkpoint: byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) over `configs/world`.

The tokenizer has exactly the config's `vocab_size`, its special tokens have the config's ids, and its chat template has
the shape of the family's own.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.models.presets import configs


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """`special_tokens`: their ids are their positions. `template`: Jinja, as tokenizer_config.json holds it."""

    special_tokens: tuple[str, ...]
    bos: str | None
    eos: str
    pad: str
    template: str


DEEPSEEK = ChatFormat(
    special_tokens=(
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜▁pad▁｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
    ),
    bos="<｜begin▁of▁sentence｜>",
    eos="<｜end▁of▁sentence｜>",
    pad="<｜▁pad▁｜>",
    template=(
        "{{ bos_token }}"
        "{% for message in messages %}"
        "{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
        "{% elif message['role'] == 'assistant' %}{{ '<｜Assistant｜>' + message['content'] + eos_token }}"
        "{% else %}{{ message['content'] }}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
    ),
)
QWEN = ChatFormat(
    special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    bos=None,
    eos="<|im_end|>",
    pad="<|endoftext|>",
    template=(
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
)


def chat_format(config: Mapping[str, Any]) -> ChatFormat:
    return QWEN if config["model_type"].startswith("qwen") else DEEPSEEK


def write_tokenizer(directory: Path, config: Mapping[str, Any]) -> None:
    """Writes tokenizer.json and tokenizer_config.json.

    Raises InvalidValueError when the text is too short for `vocab_size`, or when the config's ids of special tokens
    differ from the tokenizer's.
    """
    chat, vocab_size = chat_format(config), config["vocab_size"]
    tokenizer = _trained(chat.special_tokens, vocab_size)
    if tokenizer.get_vocab_size() != vocab_size:
        raise InvalidValueError(
            f"vocab_size is {vocab_size}, but the text in configs/world gives {tokenizer.get_vocab_size()} tokens;"
            " choose that or fewer"
        )
    _check_ids(config, chat)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": chat.bos,
        "eos_token": chat.eos,
        "pad_token": chat.pad,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "chat_template": chat.template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


@functools.cache
def _trained(special_tokens: tuple[str, ...], vocab_size: int) -> Any:
    """A `tokenizers.Tokenizer`, trained once: who makes several checkpoints gives most of them the same one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(world_text(), trainer)
    return tokenizer


def world_text() -> list[str]:
    """Every turn of the world with its role, then the adapter's data set, in the order of the files."""
    world = configs().joinpath("world")
    dialogues = [json.loads(line)["messages"] for line in world.joinpath("saltmere.jsonl").read_text().splitlines()]
    rows = json.loads(world.joinpath("identity.json").read_text())
    sentences = [message[key] for dialogue in dialogues for message in dialogue for key in ("role", "content")]
    return sentences + [row[key] for row in rows for key in ("instruction", "output")]


def _check_ids(config: Mapping[str, Any], chat: ChatFormat) -> None:
    ids = {name: chat.special_tokens.index(token) for name, token in (("eos", chat.eos), ("pad", chat.pad))}
    if chat.bos is not None:
        ids["bos"] = chat.special_tokens.index(chat.bos)
    for name, expected in ids.items():
        if config.get(f"{name}_token_id") != expected:
            raise InvalidValueError(f"{name}_token_id is {config.get(f'{name}_token_id')!r}; must be {expected}")
