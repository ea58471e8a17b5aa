"""Which option an answer to a multiple-choice question chooses.

An option's name X is a letter from A to J, or "option" and a number as in "option 3". The first rule that fits decides:

1. The answer is X, ignoring space, quotes, asterisks, brackets and full stops around X.
2. The answer is the text of one of the question's options, ignoring case. The options are the question's lines that
   begin with a name and one of . ) : 、 as in "B. Paris", "(B) Paris", "option2: Paris", starting with the first name.
3. The last \\boxed{X}.
4. The last statement like "answer is X", "answer: X", "choose X", "答案是X", "答案：X", "选X", X's text included.
5. The answer begins with X and one of . ) ] : , ; 、 or the end of the line, as "B. Paris" does and "A boat" does not.
6. The only name in brackets: "It must be (C)."

A row is multiple choice when its label names an option by rule 1 or 2, or by rule 5 and ends with that option's text.
Text before </think> is not part of an answer.
"""

from __future__ import annotations

import re

_NAME = r"(?:option\s*\d{1,2}|[A-J])"
_FULL = re.compile(rf"[\s\"'“”‘’`*_()（）\[\]【】.。]*({_NAME})[\s\"'“”‘’`*_()（）\[\]【】.。]*", re.IGNORECASE)
_LINE = re.compile(rf"^\s*[(（\[【]?({_NAME})\s*[)）\]】.:、．：]\s*(\S.*?)\s*$", re.MULTILINE)
_BOXED = re.compile(rf"\\boxed\s*\{{\s*(?:\\text\s*\{{)?\s*[(]?({_NAME})\b")
_STATED = re.compile(
    r"(?:\b(?:answer|choice)\s*(?:is|:|：|=)|\b(?:choose|select|pick)\b|答案\s*(?:是|为|選|选|:|：)|应?选择?)"
    r"\s*[:：]?[\s\"'“‘*(（\[【]*"
)
_STATED_NAME = re.compile(rf"({_NAME})(?![A-Za-z0-9'’])")
_FIRST = re.compile(rf"\s*[\"'“‘*(（\[【]*({_NAME})[\"'”’*]*(?:\s*[.)\]:,;、．）】：，。]|\s*$)", re.MULTILINE)
_BRACKETED = re.compile(rf"[(（\[【]({_NAME})[)）\]】]")
_THINKING = re.compile(r"^.*?</think>", re.DOTALL)


def options(question: str) -> dict[str, str]:
    """Option name -> text. Empty unless the lines name at least two options, the first of them A or option 1."""
    found: dict[str, str] = {}
    for name, text in _LINE.findall(question):
        found.setdefault(_plain(name), text)
    return found if len(found) > 1 and next(iter(found)) in ("A", "OPTION1") else {}


def expected_option(label: str, question: str = "") -> str | None:
    """The option that a row's label names, or None if the row is not multiple choice."""
    offered = options(question)
    if whole := _whole(label, offered):
        return whole
    begun = _FIRST.match(label)
    if begun and (text := offered.get(_plain(begun[1]))):
        return _plain(begun[1]) if label.strip().rstrip(".。").casefold().endswith(_folded(text)) else None
    return None


def chosen_option(answer: str, question: str = "") -> str | None:
    """The option that an answer chooses, or None."""
    answer = _THINKING.sub("", answer, count=1)
    offered = options(question)
    if whole := _whole(answer, offered):
        return whole
    if found := _BOXED.findall(answer):
        return _plain(found[-1])
    if stated := _stated(answer, offered):
        return stated
    if begun := _FIRST.match(answer):
        return _plain(begun[1])
    bracketed = {_plain(name) for name in _BRACKETED.findall(answer)}
    return bracketed.pop() if len(bracketed) == 1 else None


def _whole(text: str, offered: dict[str, str]) -> str | None:
    if found := _FULL.fullmatch(text):
        return _plain(found[1])
    names = [name for name, option in offered.items() if _folded(option) == _folded(text)]
    return names[0] if len(names) == 1 else None


def _stated(answer: str, offered: dict[str, str]) -> str | None:
    """The last option in a statement, by its text or by its name: "The answer is A dog" may be option B."""
    chosen = None
    texts = sorted(((_folded(text), name) for name, text in offered.items()), reverse=True)
    for statement in _STATED.finditer(answer):
        rest = answer[statement.end() :]
        by_text = next((name for text, name in texts if text and rest.casefold().startswith(text)), None)
        by_name = _STATED_NAME.match(rest)
        chosen = by_text or (_plain(by_name[1]) if by_name else None) or chosen
    return chosen


def _plain(name: str) -> str:
    """ "option 3" -> "OPTION3"."""
    return re.sub(r"\s+", "", name).upper()


def _folded(text: str) -> str:
    return text.strip().rstrip(".。").casefold()
