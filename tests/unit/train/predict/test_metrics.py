"""Figures against LLaMA-Factory's for the same texts, and against what must hold for any text."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.cases import examples

from kt_runtime.errors import NotFoundError
from kt_runtime.train.predict.metrics import Scorer, check_packages, means

PERCENTAGES = ("bleu-1", "bleu-2", "bleu-3", "bleu-4", "rouge-1", "rouge-2", "rouge-l")


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    return Scorer()


def test_figures_are_those_that_llama_factory_prints(scorer: Scorer) -> None:
    figures = scorer.score("Tie up the boat.", "Tie the boat up now.")
    assert figures["bleu-4"] == pytest.approx(63.83, abs=0.005)
    assert figures["rouge-1"] == pytest.approx(90.91, abs=0.005)


def test_bleu_of_chinese_by_hand(scorer: Scorer) -> None:
    """6 of 7 characters, all n-grams right: only the brevity penalty exp(1 - 7/6) is left."""
    figures = scorer.score("他在海边钓鱼", "他在海边钓鱼。")
    assert [figures[f"bleu-{order}"] for order in (1, 2, 3, 4)] == [84.6482] * 4
    assert figures["rouge-1"] == pytest.approx(100 * 2 * 4 / (4 + 5), abs=5e-5)  # 他 在 海边 钓鱼 (。)


def test_bleu_orders_differ_only_in_their_weights(scorer: Scorer) -> None:
    """abcd against abcf: precisions 3/4, 2/3, 1/2, and by method 3 half of one for the order without a match."""
    figures = scorer.score("abcd", "abcf")
    precisions = [3 / 4, 2 / 3, 1 / 2, 1 / 2]
    for order in range(1, 5):
        product = 1.0
        for precision in precisions[:order]:
            product *= precision
        assert figures[f"bleu-{order}"] == pytest.approx(100 * product ** (1 / order), abs=5e-5)  # four decimals


@pytest.mark.parametrize(("prediction", "label"), [("", "x"), ("x", ""), (" \n", "boat"), ("", "")])
def test_an_empty_side_scores_zero(scorer: Scorer, prediction: str, label: str) -> None:
    figures = scorer.score(prediction, label)
    assert all(figures[name] == 0 for name in PERCENTAGES)


@settings(max_examples=examples(60), deadline=None)
@given(prediction=st.text(max_size=40), label=st.text(max_size=40))
def test_any_text_has_figures_within_bounds(scorer: Scorer, prediction: str, label: str) -> None:
    figures = scorer.score(prediction, label)
    assert set(PERCENTAGES) <= set(figures)
    assert all(0 <= figures[name] <= 100.0001 for name in PERCENTAGES)
    assert figures["exact_match"] == (prediction.strip() == label.strip())


def test_accuracy_is_the_share_of_multiple_choice_rows_alone(scorer: Scorer) -> None:
    rows = [("The answer is B.", "B"), ("(C)", "B"), ("A boat.", "She ties the boat."), ("A", "(A)")]
    figures = means(scorer.score(prediction, label) for prediction, label in rows)
    assert figures["accuracy"] == 2 / 3
    assert figures["exact_match"] == 0


@pytest.mark.slow
def test_the_libraries_print_nothing_and_leave_no_file(tmp_path: Path) -> None:
    """jieba by itself logs to stderr and keeps a cache among the temporary files, which it reads back with marshal."""
    code = "from kt_runtime.train.predict.metrics import Scorer; Scorer().score('他在海边钓鱼', '海边')"
    environment = {"TMPDIR": str(tmp_path), "PYTHONSAFEPATH": "1", "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    python_path = [entry for entry in sys.path if entry and Path(entry).is_dir()]
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"PYTHONPATH": ":".join(python_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert list(tmp_path.rglob("*")) == []


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def find(name: str, *rest: Any) -> Any:
        return None if name in ("jieba", "rouge_chinese") else found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(NotFoundError, match=r'jieba and rouge-chinese.*pip install "kt-runtime\[metrics\]"'):
        check_packages()
