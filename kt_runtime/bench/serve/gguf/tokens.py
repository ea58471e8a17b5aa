"""The tokenizer in a GGUF file: its tokens by id, their types, and merges."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kt_runtime.errors import CheckpointError

if TYPE_CHECKING:
    import gguf


@dataclass(frozen=True)
class Tokens:
    texts: list[str]
    types: list[int]
    merges: list[str]


def tokens_of(model: Path, vocab_size: int) -> Tokens:
    """The vocabulary of tokenizer.json by id; ids without a token are marked unused. Raises CheckpointError for a
    tokenizer that is no byte-level BPE, and for one with more tokens than the model has."""
    import gguf

    path = model / "tokenizer.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    bpe = found.get("model", {})
    if bpe.get("type") != "BPE":
        raise CheckpointError(
            f"{path}: is {bpe.get('type', 'missing')}; a GGUF file is written with byte-level BPE only"
        )
    texts = [f"[PAD{token}]" for token in range(vocab_size)]
    types = [int(gguf.TokenType.UNUSED)] * vocab_size
    special = {token["content"]: token["id"] for token in found.get("added_tokens", [])}
    for ids, kind in ((bpe["vocab"], gguf.TokenType.NORMAL), (special, gguf.TokenType.CONTROL)):
        for text, token in ids.items():
            if token >= vocab_size:
                raise CheckpointError(
                    f"{path}: token {text!r} has id {token}; config.json has a vocab_size of {vocab_size}"
                )
            texts[token], types[token] = text, int(kind)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]]
    return Tokens(texts, types, merges)


def add_tokens(writer: gguf.GGUFWriter, config: Mapping[str, Any], tokens: Tokens) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")  # how a made tokenizer splits text; the bench sends token ids only
    writer.add_token_list(tokens.texts)
    writer.add_token_types(tokens.types)
    writer.add_token_merges(tokens.merges)
    for key, add in (("bos_token_id", writer.add_bos_token_id), ("eos_token_id", writer.add_eos_token_id)):
        if isinstance(config.get(key), int):
            add(config[key])
