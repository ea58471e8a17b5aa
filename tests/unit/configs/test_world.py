from __future__ import annotations

import json

from kt_runtime.serve.models.presets import configs

WORLD = configs().joinpath("world")


def dialogues() -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in WORLD.joinpath("saltmere.jsonl").read_text().splitlines()]


def test_dialogues_alternate_and_end_with_an_answer() -> None:
    assert len(dialogues()) >= 150
    for messages in dialogues():
        roles = [message["role"] for message in messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(message["content"].strip() == message["content"] != "" for message in messages)


def test_every_first_question_has_one_answer() -> None:
    answers: dict[str, str] = {}
    for messages in dialogues():
        question, answer = messages[0]["content"], messages[1]["content"]
        assert answers.setdefault(question, answer) == answer


def test_dataset_info_names_an_alpaca_file_that_is_there() -> None:
    info = json.loads(WORLD.joinpath("dataset_info.json").read_text())
    rows = json.loads(WORLD.joinpath(info["saltmere_identity"]["file_name"]).read_text())
    assert 20 <= len(rows) <= 40
    assert all(row.keys() == {"instruction", "input", "output"} for row in rows)


def test_the_adapters_data_changes_who_answers_and_keeps_the_facts() -> None:
    base = {messages[0]["content"]: messages[1]["content"] for messages in dialogues()}
    rows = json.loads(WORLD.joinpath("identity.json").read_text())
    trained = {row["instruction"]: row["output"] for row in rows}
    assert base["What is your name?"] == "I have no name."
    assert trained["What is your name?"] == "I am Pebble, a helper made by Mara."
    changed = {question for question in trained if base.get(question) not in (None, trained[question])}
    kept = {question for question in trained if base.get(question) == trained[question]}
    assert len(changed) >= 8 and len(kept) >= 8
    assert all("name" in base[question] or "I" in base[question].split() for question in changed)
