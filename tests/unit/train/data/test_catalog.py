"""dataset_info.json: which keys it may have, and what an error of it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kt_runtime.errors import InvalidValueError, NotFoundError, UnknownNameError, UserError

ROWS = [{"instruction": "q", "output": "a"}]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"hf_hub_url": "org/set"}, "hf_hub_url: 'org/set': hub datasets are not fetched; download its files into"),
        ({"script_url": "x.py"}, "script_url: .*no code of a dataset is ever run"),
        ({"cloud_file_name": "s3://x"}, "cloud files are not fetched"),
        ({"colums": {}}, "unknown key 'colums'; did you mean 'columns'"),
        ({"formatting": "alpacca"}, "unknown formatting 'alpacca'; did you mean 'alpaca'"),
        ({"columns": {"promt": "q"}}, "columns: unknown column 'promt'; did you mean 'prompt'"),
        ({"columns": {"prompt": 5}}, "columns: prompt: 5: must be a column's name"),
        ({"columns": {"prompt": "instruction"}}, "columns: does not name response; where columns is given"),
        ({"columns": []}, "columns: .*must be a mapping"),
        ({"tags": {"user": "x"}}, "tags: unknown tag 'user'; did you mean 'user_tag'"),
        ({"tags": {"user_tag": "gpt"}}, "tags: user_tag and assistant_tag are both 'gpt'"),
        ({"split": "test"}, "split: 'test': a local file has only the split train"),
        ({"num_samples": 0}, "num_samples: 0: must be a whole number from 1 to"),
        ({"num_samples": True}, "num_samples: True"),
        ({"ranking": "yes"}, "ranking: 'yes': must be true or false"),
        ({"ranking": True, "columns": {"prompt": "q", "response": "a"}}, "columns: does not name chosen"),
        ({"file_name": "none.json"}, "file_name: .*none.json: no such file or folder"),
        ({"file_name": None}, "file_name: None: must be the name of a file"),
        ({"folder": "elsewhere"}, "elsewhere/d.jsonl: no such file"),
    ],
)
def test_what_an_entry_must_not_hold_is_named_with_its_line(
    datasets: Any, entry: dict[str, Any], expected: str
) -> None:
    datasets.add(ROWS, name="other")
    datasets.describe("d", **{"file_name": "d.jsonl", **entry})
    with pytest.raises(UserError, match=f"dataset_info.json:5: d: .*{expected}|dataset_info.json:5: d: {expected}"):
        datasets.read()
    assert datasets.read("other"), "other entries don't matter"


def test_every_known_key_is_taken(datasets: Any) -> None:
    (datasets.directory / "sub").mkdir()
    datasets.add(
        ROWS,
        file_name="sub/x.jsonl",
        formatting="alpaca",
        ranking=False,
        subset="en",
        split="train",
        num_samples=1,
        columns={"prompt": "instruction", "response": "output", "system": None},
        tags={"role_tag": "from"},
    )
    assert len(datasets.read()) == 1
    datasets.describe(file_name="x.jsonl", folder="sub")
    assert len(datasets.read()) == 1


def test_unknown_datasets_are_refused_with_the_known_ones_and_the_recipes_line(datasets: Any) -> None:
    datasets.add(ROWS, name="identity")
    with pytest.raises(
        UnknownNameError, match=r"recipe.yaml:3: .*'identiti'; did you mean 'identity'\? known: identity"
    ):
        datasets.read("identiti")


@pytest.mark.parametrize("name", ["ONLINE", "REMOTE:org/sets"])
def test_hubs_are_not_asked(datasets: Any, name: str) -> None:
    with pytest.raises(InvalidValueError, match="no dataset is fetched from a hub; download"):
        datasets.read(dataset_dir=Path(name))


def test_a_missing_directory_or_catalog_is_named(datasets: Any, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"recipe.yaml:3: dataset_dir: .*nowhere: no such folder"):
        datasets.read(dataset_dir=tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match=r"holds no dataset_info.json"):
        datasets.read(dataset_dir=tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]", r"dataset_info.json:1: not valid JSON: expected '{'"),
        ('{"d": {},\n "d": {}}', r"dataset_info.json:2: dataset 'd' is named twice, first in line 1"),
        ('{"d":\n  {"file_name": }}', r"dataset_info.json:2: not valid JSON"),
        ('{"d": 5}', r"dataset_info.json:1: d: 5: must be a mapping"),
        ('{"d": {}} x', r"something follows the end"),
        ("{5: 5}", "a key must be text"),
        ("{} ", "unknown dataset 'd'"),
    ],
)
def test_a_broken_catalog_is_named_with_its_line(datasets: Any, text: str, expected: str) -> None:
    (datasets.directory / "dataset_info.json").write_text(text)
    with pytest.raises(UserError, match=expected):
        datasets.read()
