"""Metrics of predictions against labels: those of LLaMA-Factory, from the same libraries.

- BLEU-n: nltk's `sentence_bleu` over characters, equal weights for 1..n, smoothing method 3 (Chen & Cherry, 2014).
- ROUGE-1, -2, -L (F): rouge_chinese over the words that jieba cuts, joined by spaces; 0 when either side has no word.
- exact_match: 1 when both are equal except for surrounding whitespace, else 0.
- accuracy: 1 when both choose the same option by the rule of `multiple_choice.py`, else 0; multiple choice only.

BLEU and ROUGE are percentages, the last two are shares, as in the tables of KTransformers' guide to fine-tuning. As in
LLaMA-Factory, a set's figure is the mean over its rows, each rounded to 4 digits before.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from kt_runtime.errors import NotFoundError
from kt_runtime.train.predict.multiple_choice import chosen_option, expected_option

PACKAGES = {"nltk": "nltk", "jieba": "jieba", "rouge_chinese": "rouge-chinese"}  # module -> name on PyPI
INSTALL = 'pip install "kt-runtime[metrics]"'
DIGITS = 4


def check_packages() -> None:
    """Raises NotFoundError with the installation command if packages for the metrics are missing."""
    missing = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise NotFoundError(
            f"BLEU and ROUGE need {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            f"{INSTALL}"
        )


class Scorer:
    """Loads the libraries once (jieba's dictionary takes a second). Raises NotFoundError if one is missing."""

    def __init__(self) -> None:
        check_packages()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # jieba imports pkg_resources, which warns on stderr
            import jieba
            from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
            from rouge_chinese import Rouge
        self._sentence_bleu, self._smoothing = sentence_bleu, SmoothingFunction().method3
        self._rouge = Rouge()
        self._words = _jieba_tokenizer(jieba)

    def score(self, prediction: str, label: str, question: str = "") -> dict[str, float]:
        """The row's figures by name: bleu-1..4, rouge-1, rouge-2, rouge-l, exact_match; accuracy if multiple choice.

        `question`: the user's last message, which lists the options.
        """
        figures = {f"bleu-{order}": self._bleu(prediction, label, order) for order in range(1, 5)}
        figures |= self._rouges(prediction, label)
        figures["exact_match"] = float(prediction.strip() == label.strip())
        if expected := expected_option(label, question):
            figures["accuracy"] = float(chosen_option(prediction, question) == expected)
        return {name: round(value, DIGITS) for name, value in figures.items()}

    def _bleu(self, prediction: str, label: str, order: int) -> float:
        weights = (1 / order,) * order
        value = self._sentence_bleu([list(label)], list(prediction), weights, smoothing_function=self._smoothing)
        return 100.0 * float(value)

    def _rouges(self, prediction: str, label: str) -> dict[str, float]:
        sides = [" ".join(self._words.cut(text)) for text in (prediction, label)]
        if not all(side.split() for side in sides):
            return {"rouge-1": 0.0, "rouge-2": 0.0, "rouge-l": 0.0}
        scores = self._rouge.get_scores(*sides)[0]
        return {name: 100.0 * float(score["f"]) for name, score in scores.items()}


def means(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each figure over the rows that have it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: math.fsum(column) / len(column) for name, column in values.items()}


@cache
def _jieba_tokenizer(jieba: Any) -> Any:
    """The tokenizer behind `jieba.cut`, without jieba's cache file in the directory for temporary files.

    jieba reads that file with `marshal`, although anybody may have written it, and prints log lines when it writes it.
    Parsing the dictionary, once in a process, takes no longer than jieba's first use.
    """
    tokenizer = jieba.Tokenizer()
    tokenizer.FREQ, tokenizer.total = tokenizer.gen_pfdict(tokenizer.get_dict_file())
    tokenizer.initialized = True
    return tokenizer
