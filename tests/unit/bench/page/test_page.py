"""docs/measurements.md, docs/performance.md, README.md's tables and the demo's picture are what the JSON files make."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from kt_runtime.bench.page.checkout import MEASUREMENTS, generate, generated, stale
from kt_runtime.bench.page.markdown import BLOCK, shown, with_blocks
from kt_runtime.bench.page.measurement import Measurement, read_all, read_frame
from kt_runtime.cli.main import main
from kt_runtime.errors import InvalidValueError

ROOT = Path(__file__).resolve().parents[4]
CODE = re.compile(r"```.*?```|^    .*?$|`[^`]*`", re.DOTALL | re.MULTILINE)
MEASURED = re.compile(r"\d[\d.,]*\s?(?:%|ms|s|seconds|minutes|[KMG]i?B(?:/s)?|tokens/s|GFLOP/s|Gop/s|times|x)(?![\w-])")


@pytest.fixture(scope="module")
def measurements() -> dict[str, Measurement]:
    return read_all(ROOT / MEASUREMENTS)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of all that is generated, and of its sources."""
    for name in ("docs/measurements", "docs/pictures"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("docs/measurements.md", "docs/performance.md", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def one(**changes: Any) -> dict[str, Any]:
    """A measurement's file as Python values."""
    row = {"case": ["bf16"], "figures": [0.5, [1, 2]]}
    columns = [{"name": "time", "unit": "ms"}, {"name": "M=1", "unit": ["ms", "share"]}]
    origin = {"title": "One", "kind": "experts", "date": "2026-01-31", "machine": "here", "hardware": "one processor"}
    table = {"name": "steps", "case": ["format"], "columns": columns, "rows": [row]}
    return origin | {"command": "kt-runtime bench experts", "commit": "abc1234", "tables": [table]} | changes


def read_one(directory: Path, file: dict[str, Any]) -> Measurement:
    (directory / "one.json").write_text(json.dumps(file))
    return read_all(directory)["one"]


@pytest.mark.parametrize("path", generated(ROOT), ids=str)
def test_what_is_generated_is_what_the_json_files_make(path: Path) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == generated(ROOT)[path], "run `kt-runtime bench page`"


def test_each_file_is_on_the_page_with_its_origin(measurements: dict[str, Measurement]) -> None:
    pages = {
        name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("measurements", "performance")
    }
    frame = read_frame(ROOT / MEASUREMENTS)
    place = dict.fromkeys(frame.measurements.sections, "measurements")
    place |= dict.fromkeys(frame.performance.sections, "performance")
    assert set(place) >= {each.kind for each in measurements.values()}
    for name, each in measurements.items():
        page, link = pages[place[each.kind]], "performance.md" if place[each.kind] == "performance" else ""
        assert f"| [{each.title}]({link}#" in pages["measurements"]
        assert f"### {each.title}\n\n[{name}.json](measurements/{name}.json)" in page
        assert each.hardware in page and (each.command is None or f"`{each.command}`" in page)
        assert each.figures or each.tables or each.notes
    assert len({each.title for each in measurements.values()}) == len(measurements), "titles are anchors of the page"


def test_readme_has_no_measured_figure_outside_its_generated_blocks() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = [match["sources"] for match in BLOCK.finditer(readme)]
    assert len(blocks) >= 6 and MEASURED.search("".join(match[0] for match in BLOCK.finditer(readme)))
    assert not MEASURED.findall(CODE.sub("", BLOCK.sub("", readme)))


def test_readme_links_to_files_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", readme) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []
    pictures = [link for link in links if link.endswith(".svg")]
    assert pictures == ["docs/pictures/architecture.svg", "docs/pictures/demo.svg"]
    assert all(ElementTree.parse(ROOT / link).getroot().tag.endswith("}svg") for link in pictures)


def test_an_edited_page_is_found_and_generated_again(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stale(checkout) == []
    page, readme = checkout / "docs" / "measurements.md", checkout / "README.md"
    performance = checkout / "docs" / "performance.md"
    whole = {path: path.read_text(encoding="utf-8") for path in (page, performance, readme)}
    page.write_text(whole[page].replace("44", "43"), encoding="utf-8")
    performance.unlink()
    readme.write_text(re.sub(BLOCK, r"\g<begin>nothing\n\g<end>", whole[readme]), encoding="utf-8")
    assert main(["bench", "page", "--check", "--checkout", str(checkout)]) == 2
    assert "docs/measurements.md, docs/performance.md, README.md" in capsys.readouterr().err
    assert generate(checkout) == [Path("docs/measurements.md"), Path("docs/performance.md"), Path("README.md")]
    assert {path: path.read_text(encoding="utf-8") for path in (page, performance, readme)} == whole
    assert main(["bench", "page", "--check", "--checkout", str(checkout)]) == 0


def test_a_directory_that_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "page", "--checkout", str(tmp_path)]) == 2
    assert "--checkout" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hardware": ""}, r"length >= 1.*\$\.hardware"),
        ({"date": "yesterday"}, r"\$\.date"),
        ({"kind": "speed"}, r"\$\.kind"),
        ({"colour": 1}, "unknown field `colour`"),
        ({"commit": None}, r"why_unknown.*\['commit'\]"),
        ({"commit": None, "why_unknown": {"date": "no"}}, "why_unknown"),
        ({"figures": [{"what": "time", "value": 1}]}, "unit"),
        ({"figures": [{"what": "time", "value": "fast", "unit": "ms"}]}, r"\$\.figures\[0\]\.value"),
        ({"figures": [{"what": "time", "value": {"least": 2, "most": 1}, "unit": "ms"}]}, "least 2 is above most 1"),
    ],
)
def test_a_file_says_what_was_run_where_and_in_which_unit(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert read_one(tmp_path, one()).commit == "abc1234"
    with pytest.raises(InvalidValueError, match=rf"one\.json.*{said}"):
        read_one(tmp_path, one(**changes))


def test_a_kind_has_a_heading_on_one_page(checkout: Path) -> None:
    file = checkout / MEASUREMENTS / "page.json"
    frame = json.loads(file.read_text(encoding="utf-8"))
    frame["performance"]["sections"]["demo"] = "Demo"
    file.write_text(json.dumps(frame), encoding="utf-8")
    with pytest.raises(InvalidValueError, match=r"page\.json: demo: has a heading on both pages"):
        generated(checkout)
    frame["performance"]["sections"] = {}
    file.write_text(json.dumps(frame), encoding="utf-8")
    with pytest.raises(InvalidValueError, match="lacks a heading for serving"):
        generated(checkout)


@pytest.mark.parametrize("row", [{"case": [], "figures": [1, [1, 2]]}, {"case": ["a"], "figures": [1]}])
def test_a_row_has_a_cell_for_each_column(tmp_path: Path, row: dict[str, Any]) -> None:
    table = one()["tables"][0] | {"rows": [row]}
    with pytest.raises(InvalidValueError, match="the table 'steps' has 1 and 2 columns"):
        read_one(tmp_path, one(tables=[table]))


@pytest.mark.parametrize("cell", [1, [1], [1, 2, 3]])
def test_a_cell_has_a_figure_for_each_unit_of_its_column(tmp_path: Path, cell: Any) -> None:
    table = one()["tables"][0] | {"rows": [{"case": ["bf16"], "figures": [1, cell]}]}
    with pytest.raises(InvalidValueError, match="'M=1' needs one figure for each of"):
        read_one(tmp_path, one(tables=[table]))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("0.80", "0.80"),
        ("1862208", "1,862,208"),
        ("1710", "1710"),
        ("1.7e-14", "1.7e-14"),
        ("0.000002", "2e-6"),
        ("null", "-"),
        ('{"least": 0.10, "most": 0.23}', "0.10 to 0.23"),
        ("[1.00, null]", "1.00, -"),
    ],
)
def test_a_figure_keeps_its_digits(tmp_path: Path, written: str, said: str) -> None:
    text = json.dumps(one(figures=[{"what": "it", "value": "HERE", "unit": "ms"}])).replace('"HERE"', written)
    (tmp_path / "one.json").write_text(text)
    assert shown(read_all(tmp_path)["one"].figures[0].value) == said


def test_a_block_holds_the_table_and_its_origin(tmp_path: Path) -> None:
    measurements = {"one": read_one(tmp_path, one())}
    text = "before\n<!-- measured: one#steps -->\nold\n<!-- end of measured -->\nafter\n"
    made = with_blocks(text, measurements, "README.md")
    assert "| bf16 | 0.5 | 1, 2 |" in made and "old" not in made
    assert "| format | time [ms] | M=1 [ms, share] |" in made
    assert "`kt-runtime bench experts`, one processor, 2026-01-31, commit abc1234." in made
    assert made.startswith("before\n<!-- measured: one#steps -->\n") and made.endswith(
        "<!-- end of measured -->\nafter\n"
    )
    assert with_blocks(made, measurements, "README.md") == made


def test_tables_of_several_machines_become_one(tmp_path: Path) -> None:
    measurements = {"one": read_one(tmp_path, one()), "two": read_one(tmp_path, one(machine="there"))}
    made = with_blocks("<!-- measured: one#steps two#steps -->\n<!-- end of measured -->", measurements, "README.md")
    assert "| here | bf16 |" in made and "| there | bf16 |" in made


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ("onne#steps", "'onne' in docs/measurements; did you mean 'one'"),
        ("one#step", "one has no table 'step'; its tables: steps"),
        ("one one#steps", "do not make one table"),
        ("", "names no FILE#TABLE"),
    ],
)
def test_a_block_of_an_unknown_table_is_an_error_with_its_line(tmp_path: Path, sources: str, said: str) -> None:
    measurements = {"one": read_one(tmp_path, one())}
    with pytest.raises(InvalidValueError, match=f"README.md:2: .*{said}"):
        with_blocks(f"\n<!-- measured: {sources} -->\n<!-- end of measured -->", measurements, "README.md")


PLOT: dict[str, Any] = {
    "name": "steps",
    "title": "A & B",
    "x": "step",
    "panels": [
        {"name": "reward", "unit": "mean", "curves": [{"name": "off", "values": [0, 0.5, 1.0]}]},
        {"name": "moved", "unit": "share", "curves": [{"name": "off", "values": [0, 0, 0]}]},
    ],
}


def test_a_plot_becomes_a_picture_on_the_page(checkout: Path) -> None:
    (checkout / MEASUREMENTS / "one.json").write_text(json.dumps(one(plots=[PLOT])))
    generate(checkout)
    assert "![A & B](pictures/steps.svg)" in (checkout / "docs" / "measurements.md").read_text()
    root = ElementTree.fromstring((checkout / "docs" / "pictures" / "steps.svg").read_text())
    curves = [
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        for line in root.iter("{http://www.w3.org/2000/svg}polyline")
    ]
    assert len(curves) == 2 and all(len(points) == 3 for points in curves)
    (left, low), (middle, half), (right, high) = curves[0]
    assert middle == (left + right) / 2 and half == (low + high) / 2
    assert low > half > high and len({y for _, y in curves[1]}) == 1
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"A & B", "off", "reward [mean]", "moved [share]", "step", "1", "3"} <= set(texts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "../x"}, "plots"),
        ({"panels": []}, "panels"),
        ({"panels": [{"name": "a", "unit": "b", "curves": [{"name": "off", "values": [1]}]}]}, "values"),
        (
            {"panels": [PLOT["panels"][0], {"name": "b", "unit": "c", "curves": [{"name": "on", "values": [1, 2]}]}]},
            "its panels have different curves",
        ),
    ],
    ids=["name", "no panel", "one value", "curves"],
)
def test_a_plot_that_can_not_be_drawn_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=message):
        read_one(tmp_path, one(plots=[PLOT | changes]))
