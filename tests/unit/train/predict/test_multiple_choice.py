"""Which option an answer chooses: the rule of the module, case by case."""

from __future__ import annotations

import pytest

from kt_runtime.train.predict.multiple_choice import chosen_option, expected_option, options

QUESTION = """Which animal does Mara have?
A. A grey cat
B. A dog.
C) A goat
(D) Two hens"""
NUMBERED = "Which drug is given first?\noption1: Quinine\noption2: Artesunate\noption 3: Aspirin"


def test_options_are_the_lines_that_begin_with_a_name() -> None:
    assert options(QUESTION) == {"A": "A grey cat", "B": "A dog.", "C": "A goat", "D": "Two hens"}
    assert options(NUMBERED) == {"OPTION1": "Quinine", "OPTION2": "Artesunate", "OPTION3": "Aspirin"}
    assert options("A. alone") == {}
    assert options("B: hello\nC: hello") == {}, "a talk between B and C"


@pytest.mark.parametrize(
    ("label", "question", "expected"),
    [
        ("B", "", "B"),
        ("(b)", "", "B"),
        ("**C**.", "", "C"),
        ("A dog", QUESTION, "B"),
        ("B. A dog", QUESTION, "B"),
        ("option 3", "", "OPTION3"),
        ("Artesunate", NUMBERED, "OPTION2"),
        ("A dog", "", None),
        ("A. I tie the boat.", "", None),
        ("B. A dog, since he barks", QUESTION, None),
        ("I am Pebble.", "", None),
        ("The answer is B.", QUESTION, None),
        ("", QUESTION, None),
    ],
)
def test_a_label_makes_a_row_multiple_choice(label: str, question: str, expected: str | None) -> None:
    assert expected_option(label, question) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("B", "B"),
        ("b.", "B"),
        (" (B) ", "B"),
        ("B. A dog", "B"),
        ("B) because he barks", "B"),
        ("B\nHe barks.", "B"),
        ("A dog.", "B"),
        ("a DOG", "B"),
        ("The answer is B.", "B"),
        ("The correct answer is: **B**", "B"),
        ("Answer: (B)", "B"),
        ("A is wrong, C is wrong. So I choose B.", "B"),
        ("The answer is A. No: the answer is B", "B"),
        (r"Thus \boxed{B}", "B"),
        (r"The answer is A? No, \boxed{\text{B}}.", "B"),
        ("答案是B", "B"),
        ("正确答案：B。", "B"),
        ("选B", "B"),
        ("<think>The answer is A, or (C).</think>\nB", "B"),
        ("It must be (B), the barking one.", "B"),
        ("A boat lies there.", None),
        ("Either (A) or (B).", None),
        ("Mara has an animal.", None),
        ("The answer is Bravery", None),
        ("The answer is A dog", "B"),
        ("The answer is a dog of hers", "B"),
        ("The answer is a pig", None),
        ("", None),
    ],
)
def test_an_answer_chooses_an_option(answer: str, expected: str | None) -> None:
    assert chosen_option(answer, QUESTION) == expected


def test_numbered_options_are_chosen_by_name_or_text() -> None:
    assert chosen_option("option2", NUMBERED) == "OPTION2"
    assert chosen_option("The answer is option 2.", NUMBERED) == "OPTION2"
    assert chosen_option("artesunate.", NUMBERED) == "OPTION2"
