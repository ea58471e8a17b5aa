"""The demo's times, and the picture that is drawn of them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from kt_runtime.bench.page.timeline import ADAPTER, BASE, LEFT, picture, read_timeline
from kt_runtime.cli.demo.streams import Answered, timeline_of
from kt_runtime.errors import InvalidValueError

SVG = "{http://www.w3.org/2000/svg}"
FIGURES = {"model": "tiny", "before": "I don't know <that>.", "after": "I am Pebble."}
LINES = [(101.0, "500 rows"), (102.5, "step 5/24  loss 1.5000  lr 5.00e-03  |grad| 0.1  9 tokens/s  left 0:00:01")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    streams = [Answered(1, 103.0, 104.0, True), Answered(0, 100.0, 101.25, False), Answered(1, 100.5, 102.0, False)]
    moments = timeline_of(streams, LINES, 102.8, 103.0, FIGURES)
    (tmp_path / "demo.json").write_text(json.dumps(moments))
    return tmp_path / "demo.json"


def test_times_count_from_the_first_stream(path: Path) -> None:
    timeline = read_timeline(path)
    assert timeline.streams == [(0, 0.0, 1.25, False), (1, 0.5, 2.0, False), (1, 3.0, 4.0, True)]
    assert timeline.steps == [(2.5, 5, 1.5)]
    assert (timeline.optim_finished_s, timeline.first_token_s) == (2.8, 3.0)


def test_the_picture_has_a_bar_for_each_stream_in_its_place(path: Path) -> None:
    drawn = ElementTree.fromstring(picture(read_timeline(path)))
    bars = {each.get("fill"): str(each.get("d")) for each in drawn.iter(f"{SVG}path")}
    assert (bars[BASE].count("z"), bars[ADAPTER].count("z")) == (2, 1)
    width = int(str(drawn.get("width")))
    begin = float(bars[ADAPTER].removeprefix("M").split()[0])
    assert begin == LEFT + 0.75 * (width - LEFT - 24)
    assert bars[BASE].startswith(f"M{LEFT}.0 ")
    texts = ["".join(each.itertext()) for each in drawn.iter(f"{SVG}text")]
    assert any("first token 200 ms after" in text for text in texts)
    assert any("I don't know <that>." in text for text in texts) and any("I am Pebble." in text for text in texts)


def test_a_picture_needs_no_step_of_training(path: Path) -> None:
    content = json.loads(path.read_text()) | {"steps": []}
    path.write_text(json.dumps(content))
    assert not list(ElementTree.fromstring(picture(read_timeline(path))).iter(f"{SVG}polyline"))


@pytest.mark.parametrize("change", [{"streams": []}, {"first_token_s": -1}, {"extra": 1}])
def test_a_file_with_other_content_is_refused_by_its_name(path: Path, change: dict[str, object]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InvalidValueError, match=r"demo\.json"):
        read_timeline(path)
