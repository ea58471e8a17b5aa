"""The tokenizer of a GGUF model: the files next to it if there are any, else made from the file's keys.

A file stores byte-level BPE (`tokenizer.ggml.model` "gpt2") as tokens by id, their types, and merges; how text is split
first it only names (`tokenizer.ggml.pre`). The patterns here are those of the models' own tokenizer.json. For any other
kind of tokenizer, and any other name, put tokenizer.json and tokenizer_config.json next to the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kt_runtime.errors import CheckpointError
from kt_runtime.gguf_file import GgufFile

BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
    "generation_config.json",
)
_MOST_BYTES = 256 << 20
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (),
    "default": (),
    "olmo": (),
    "qwen2": (_QWEN,),
    "qwen35": (_QWEN3_5,),
    "gpt-4o": (_GPT_4O,),
    "llama4": (_GPT_4O,),
    "llama-bpe": (_LLAMA,),
    "deepseek-v3": _DEEPSEEK_V3,
    "glm4": (_LLAMA,),
    "minimax-m2": (_GPT_4O,),
}
"""Name of `tokenizer.ggml.pre` → the patterns at which text is split, one after the other. None: GPT-2's own. Names:
llama.cpp, src/llama-vocab.cpp."""
_IGNORES_MERGES = ("llama-bpe", "glm4")
"""Where a part that is a token itself is never made of others."""


def tokenizer_files(file: GgufFile) -> dict[str, bytes]:
    """File name → content. Raises CheckpointError for a tokenizer that can't be made, which says what to do."""
    directory = file.path.parent
    beside = [directory / name for name in BESIDE if (directory / name).is_file()]
    for path in beside:
        if path.stat().st_size > _MOST_BYTES:
            raise CheckpointError(f"{path}: has {path.stat().st_size} bytes; at most {_MOST_BYTES} are read")
    found = {path.name: path.read_bytes() for path in beside}
    if not any(name in found for name in ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")):
        found |= {"tokenizer.json": _tokenizer(file), "tokenizer_config.json": _settings(file)}
    return found


def _tokenizer(file: GgufFile) -> bytes:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    kind, split = file.keys.get("tokenizer.ggml.model"), file.keys.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or split not in PATTERNS:
        raise CheckpointError(
            f"{file.path}: its tokenizer is {kind!r} with pre-tokenizer {split!r}; made from a GGUF file are 'gpt2' "
            f"with {', '.join(PATTERNS)}. Put the model's tokenizer.json and tokenizer_config.json beside the file"
        )
    tokens, types = _tokens(file)
    known = (_NORMAL, _CONTROL, _USER_DEFINED)  # special tokens too: others would get ids of their own
    plain = {text: token for token, text in enumerate(tokens) if types[token] in known}
    merges = [tuple(pair.split(" ", 1)) for pair in _texts(file, "tokenizer.ggml.merges")]
    bad = next((pair for pair in merges if len(pair) != 2 or not {*pair, "".join(pair)} <= plain.keys()), None)
    if bad is not None:
        raise CheckpointError(
            f"{file.path}: key 'tokenizer.ggml.merges' holds {bad!r}; expected pairs that form tokens"
        )
    tokenizer = Tokenizer(models.BPE(plain, merges, ignore_merges=split in _IGNORES_MERGES))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not PATTERNS[split])
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[split]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if split in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    first = file.keys.get("tokenizer.ggml.bos_token_id")
    if file.keys.get("tokenizer.ggml.add_bos_token") is True and isinstance(first, int) and 0 <= first < len(tokens):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[first]} $A", special_tokens=[(tokens[first], first)]
        )
    made = json.loads(tokenizer.to_str())
    made["added_tokens"] = [
        {
            "id": token,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[token] == _CONTROL,
        }
        for token, text in enumerate(tokens)
        if types[token] in (_CONTROL, _USER_DEFINED)
    ]
    return json.dumps(made, ensure_ascii=False).encode()


def _settings(file: GgufFile) -> bytes:
    """tokenizer_config.json: the special tokens, whether a text begins with one, and the chat template."""
    tokens, _ = _tokens(file)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown")):
        found = file.keys.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < len(tokens):
            settings[name] = tokens[found]
    template = file.keys.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    return json.dumps(settings, ensure_ascii=False).encode()


def _tokens(file: GgufFile) -> tuple[list[str], list[int]]:
    tokens = _texts(file, "tokenizer.ggml.tokens")
    types = file.keys.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError(
            f"{file.path}: key 'tokenizer.ggml.token_type' has {len(types) if isinstance(types, list) else types!r} "
            f"values; expected {len(tokens)}, one for each token"
        )
    return tokens, types


def _texts(file: GgufFile, key: str) -> list[str]:
    found = file.keys.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(text, str) for text in found):
        raise CheckpointError(
            f"{file.path}: key {key!r} is missing or no list of texts; put tokenizer.json and tokenizer_config.json "
            "beside the file"
        )
    return found
