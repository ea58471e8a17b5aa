"""What the pages name exists: files, sections of other pages, and each folder of the checkout in the map."""

from __future__ import annotations

import inspect
import json
import re
from functools import cache
from pathlib import Path

import pytest

from kt_runtime.wire import ResidentClient

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "csrc" / "README.md", *(ROOT / "docs").glob("*.md")]
)
GENERATED = {"measurements.md", "performance.md"}
PYTHON = ("kt_runtime", "serve", "sglang_patch", "train")
BRACES = re.compile(r"\{([^}]*)\}")
# Generated from docs/measurements: a command names the files of its own commit.
MEASURED = re.compile(r"<!-- measured: .*?<!-- end of measured -->", re.DOTALL)
SOURCE = re.compile(r"(?<![*\w./-])[\w./-]+\.(?:py|cpp|h)\b")
# A user's file, a new file, SGLang's files and programs of llama.cpp.
NOT_OURS = re.compile(r"path/to/file\.py|FILE\.py|(?:.*/)?NAME\.py|sglang/.*|tests/device/test_x\.py|convert_\w+\.py")


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return frozenset(anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_sections_that_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, section = link.partition("#")
        target = page if not name else page.parent / name
        if "://" in link:
            continue
        if not target.exists() or (section and section not in anchors(target)):
            wrong.append(link)
    assert not wrong


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GENERATED], ids=lambda page: page.name)
def test_source_files_that_a_page_names_exist(page: Path) -> None:
    """A path may begin at the checkout, at `kt_runtime`, at `csrc`, or be the end of one: `staging.py`."""
    text = MEASURED.sub("", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL))
    named = {name for code in re.findall(r"`([^`\n]+)`", text) for name in SOURCE.findall(code)}
    assert not {name for name in named if not NOT_OURS.fullmatch(name) and not is_source(name)}


@cache
def sources() -> frozenset[str]:
    files = [path for top in (*PYTHON, "csrc", "tests") for path in (ROOT / top).rglob("*") if path.is_file()]
    return frozenset(f"/{path.relative_to(ROOT).as_posix()}" for path in files)


def is_source(name: str) -> bool:
    return any(path.endswith(f"/{name}") for path in sources())


def mapped_folders() -> set[str]:
    """The folders and modules that the table in docs/architecture.md names, braces expanded."""
    table = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("\n## Folders\n")[1].split("\n## ")[0]
    found: set[str] = set()
    for row in re.findall(r"^\| (`.*?) \|(.*?)\|", table, re.MULTILINE):
        prefix = ""
        for name in re.findall(r"`([^`]+)`", row[0]):
            prefix = name.split("/")[0] if "/" in name else prefix
            found |= expanded(name if "/" in name or not prefix else f"{prefix}/{name}")
        if row[0] == "`csrc`":
            found |= {f"csrc/{name}" for text in re.findall(r"`([^`]+)`", row[1]) for name in expanded(text)}
    return found


def expanded(name: str) -> set[str]:
    """a/{b,c} -> a/b, a/c."""
    match = BRACES.search(name)
    if match is None:
        return {name}
    return {name[: match.start()] + part + name[match.end() :] for part in match[1].split(",")}


def test_the_map_of_folders_is_the_tree() -> None:
    mapped = mapped_folders()
    gone = {name for name in mapped if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists()}
    assert not gone, "named in docs/architecture.md, not in the checkout"
    tops = {path.parent for top in PYTHON for path in (ROOT / top).glob("*/__init__.py")}
    tops |= {path for path in (ROOT / "csrc").iterdir() if path.is_dir()} | set((ROOT / "csrc" / "ops").iterdir())
    tops |= {path.with_suffix("") for path in (ROOT / "kt_runtime").glob("[!_]*.py")}
    folders = {path.relative_to(ROOT).as_posix() for path in tops if not path.is_symlink()}
    missing = {name for name in folders if not any(each == name or each.startswith(f"{name}/") for each in mapped)}
    assert not missing, "in the checkout, not in the map of docs/architecture.md"


def test_the_parsers_of_each_preset_are_in_the_table_of_the_http_page() -> None:
    page = (ROOT / "docs" / "http.md").read_text(encoding="utf-8").split("### Tool calls and reasoning\n")[1]
    said = {
        name: (tools.strip("`"), reasoning.strip("`"))
        for names, tools, reasoning in re.findall(r"^\| ([\w., -]+) \| (`[\w-]+`|none) \| (`[\w-]+`|none)", page, re.M)
        for name in names.split(", ")
        if name != "preset"
    }
    presets = {path.stem: json.loads(path.read_bytes()) for path in (ROOT / "configs" / "models").glob("[A-Zg]*.json")}
    keys = ("tool_call_parser", "reasoning_parser")
    assert said == {name: tuple(preset.get(key) or "none" for key in keys) for name, preset in presets.items()}


def test_the_methods_of_the_python_client_are_in_the_table_of_the_protocol_page() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8").split("\n## The Python client\n")[1]
    cells = re.findall(r"^\| (`.*?) \|", page.split("\n## ")[0], re.MULTILINE)
    said = [name for cell in cells for name in re.findall(r"`(\w+)\(", cell)]
    methods = {name for name, value in vars(ResidentClient).items() if inspect.isfunction(value) and name[0] != "_"}
    assert len(said) == len(set(said)) and set(said) == methods


def test_each_fault_s_tests_exist() -> None:
    """docs/faults.md names them as `file: name`."""
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:system|unit)/[\w/]+\.py): (\w+)`", page)
    assert len(named) > 50
    missing = [f"{file}: {name}" for file, name in named if f"def test_{name}(" not in _test_file(file)]
    assert not missing
    rows = re.findall(r"^\| (\d+)\. .*\| (.*) \|$", page, re.MULTILINE)
    assert {int(number) for number, _ in rows} == set(range(1, 30))


# CVEs of servers of models, by year.
ADVISORIES = {
    2024: "50050",
    2025: "10164 24357 29783 30165 30202 32444 47277 48944 59425 62164",
    2026: "3059 3060 3989 5760 7301 7302 7669 9540 22773 22778",
}


def test_each_advisory_has_a_line_with_a_test() -> None:
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8").split("\n## Advisories\n")[1]
    rows = [row for row in page.splitlines() if row.startswith("| ")][1:]
    assert rows and not [row for row in rows if not re.search(r"`(?:system|unit)/[\w/]+\.py: \w+`", row)]
    named = set(re.findall(r"CVE-\d+-\d+", "".join(rows)))
    assert named == {f"CVE-{year}-{number}" for year, numbers in ADVISORIES.items() for number in numbers.split()}


@cache
def _test_file(name: str) -> str:
    path = ROOT / "tests" / name
    return path.read_text(encoding="utf-8") if path.exists() else ""
