"""The folder map: imports go down only. Reads every import statement and #include, also those inside functions."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

ENGINE = {"sglang"}
PARTS = {
    "beside",
    "checkpoint_file",
    "device",
    "direct_file",
    "documents",
    "errors",
    "files",
    "gguf_file",
    "mapped",
    "priority",
    "spare",
    "wire",
    "experts",
    "families",
    "ops",
    "ranks",
    "adapters",
    "cache",
    "registry",
    "resident",
    "bench",
    "cli",
}
OUTSIDE = {"sglang_patch", "serve", "train"}

# What each module may import of the project itself. Its own files are always allowed.
MAY_IMPORT: dict[str, set[str]] = {
    "__main__": {"cli"},
    "errors": set(),
    "device": {"errors"},
    "direct_file": set(),
    "documents": {"errors"},
    "files": {"errors"},
    "beside": {"priority"},
    "mapped": {"beside"},
    "spare": {"beside", "mapped"},
    "priority": set(),
    "checkpoint_file": {"errors", "files"},
    "gguf_file": {"checkpoint_file", "errors", "files"},
    "wire": {"errors", "files"},
    "experts": {"_experts", "checkpoint_file", "device", "errors", "families", "files", "gguf_file"},
    "families": {"errors"},
    "ops": {"device", "experts", "families", "errors"},
    "ranks": {"_experts", "experts", "errors"},
    "adapters": {
        *("beside", "checkpoint_file", "direct_file", "families", "files", "gguf_file"),
        *("errors", "mapped", "spare"),
    },
    "cache": {"direct_file", "files", "errors"},
    "registry": {"files", "errors"},
    "resident": {
        *("beside", "device", "errors", "files", "wire", "experts", "families", "ops", "adapters", "cache", "mapped"),
        *("ranks", "spare"),
    },
    "bench": (PARTS - {"bench"}) | OUTSIDE | {"configs"},
    "cli": (PARTS - {"bench"}) | OUTSIDE | {"configs"},
    "sglang_patch": PARTS - {"bench", "cli"},
    "serve": (PARTS - {"bench", "cli"}) | {"sglang_patch", "configs"},
    "train": {"wire", "documents", "errors", "files", "adapters", "configs"},
}
# What a folder or module of `resident` may import of `resident`. All others there are above these.
RESIDENT_MAY_IMPORT: dict[str, set[str]] = {
    "fingerprint": set(),
    "routes": set(),
    "pacing": set(),
    "scheduler": {"pacing"},
    "workers": set(),
    "memory": set(),
    "host": {"fingerprint", "pacing", "routes"},
    "twin": {"fingerprint", "host", "memory", "scheduler"},
    "training": {"twin", "host", "routes", "scheduler"},
    "publishing": {"training", "twin", "host", "scheduler", "workers"},
}
MOST_FILES = 14
MOST_FILES_OF_CSRC = 16  # a header and its source are two
NEVER_IMPORTS_TORCH = {
    *(
        "beside",
        "checkpoint_file",
        "direct_file",
        "documents",
        "errors",
        "files",
        "gguf_file",
        "mapped",
        "priority",
        "spare",
        "wire",
        "families",
    ),
}

CSRC_MAY_INCLUDE: dict[str, set[str]] = {
    "base": set(),
    "ranks": {"base"},
    "threads": {"base"},
    "kernels": {"base"},
    "weights": {"base", "threads", "kernels"},
    "ops": {"base", "ranks", "threads", "kernels", "weights"},
    "step": {"base", "ranks", "threads", "kernels", "weights", "ops"},
    "bind": {"base", "ranks", "threads", "kernels", "weights", "ops", "step"},
}
# What a folder of `csrc/ops` may include of `csrc/ops`.
OPS_MAY_INCLUDE: dict[str, set[str]] = {
    "pairs": set(),
    "experts": {"pairs"},
    "dense": set(),
    "attention": set(),
    "delta": set(),
    "router": {"dense"},
    "packed": {"dense", "experts", "pairs"},
    "ranks": {"experts", "pairs"},
}


def module_files() -> list[tuple[str, Path]]:
    files = []
    for part in sorted(MAY_IMPORT):
        top = ROOT / part if part in OUTSIDE else ROOT / "kt_runtime" / part
        if top.is_dir():
            files += [(part, path) for path in sorted(top.rglob("*.py"))]
        else:
            files.append((part, top.with_suffix(".py")))
    return files


parsed = cache(ast.parse)


@pytest.fixture(scope="module", autouse=True)
def forget_what_was_parsed() -> Iterator[None]:
    """A million objects, which the next collection would go through."""
    yield
    parsed.cache_clear()


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Also those inside others. Expressions, which are most of a tree, hold none."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for inner in getattr(node, name, ()):
            yield inner
            yield from statements(inner)


@cache
def imported_names(path: Path) -> frozenset[str]:
    """Dotted names of all imports in a file; `from a import b` counts as `a.b`, since b may be a module."""
    names: set[str] = set()
    for node in statements(parsed(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def wrong_imports(part: str, path: Path) -> Iterator[str]:
    for name in imported_names(path):
        top, *rest = name.split(".")
        if top == "kt_runtime" and rest and rest[0] not in {"__version__", part, *MAY_IMPORT[part]}:
            yield f"{path.relative_to(ROOT)} imports {name}"
        if top in OUTSIDE:
            yield f"{path.relative_to(ROOT)} imports {name}; it is installed as kt_runtime.{top}"
        if top in ENGINE and part not in {"sglang_patch", "serve"}:
            yield f"{path.relative_to(ROOT)} imports {name}"
        if top in {"torch", "transformers"} and part in NEVER_IMPORTS_TORCH:
            yield f"{path.relative_to(ROOT)} imports {name}"


def test_python_imports_go_down_only() -> None:
    files = module_files()
    assert files
    wrong = [problem for part, path in files for problem in wrong_imports(part, path)]
    assert not wrong, "\n".join(wrong)


def module_graph() -> dict[str, set[str]]:
    """Module -> the project's modules that it imports, also within functions and for type checkers only."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for _, path in module_files()}
    dotted = {path: name if name.startswith("kt_runtime") else f"kt_runtime.{name}" for path, name in names.items()}
    modules = {name.removesuffix(".__init__") for name in dotted.values()}
    graph = {}
    for path, name in dotted.items():
        found = {found if found in modules else found.rpartition(".")[0] for found in imported_names(path)}
        graph[name.removesuffix(".__init__")] = (found & modules) - {name.removesuffix(".__init__")}
    return graph


def circle_in(graph: Mapping[str, set[str]]) -> list[str]:
    """Names that lead back to the first one; empty if there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not circle_in(module_graph())


def test_a_circle_within_a_folder_is_found() -> None:
    graph = module_graph()
    folders = {name.rpartition(".")[0] for name in graph}
    assert "kt_runtime.serve.tinker" in folders and "kt_runtime.cache" in folders
    for folder in folders:
        inside = {(name, other) for name in graph for other in graph[name] if name.startswith(f"{folder}.")}
        for name, other in sorted(inside)[:1]:
            planted = graph | {other: graph[other] | {name}}
            assert set(circle_in(planted)) >= {name, other}


def folder_graph(folder: str, modules: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """What `folder` holds, sub-folders and modules alike -> what of it each imports."""
    graph: dict[str, set[str]] = {}
    for name, imported in modules.items():
        if name.startswith(f"{folder}."):
            inside = {found.split(".")[folder.count(".") + 1] for found in imported if found.startswith(f"{folder}.")}
            child = name.split(".")[folder.count(".") + 1]
            graph.setdefault(child, set()).update(inside - {child})
    return graph


def test_no_parts_of_a_folder_import_each_other_in_a_circle() -> None:
    graph = module_graph()
    folders = {name.rpartition(".")[0] for name in graph}
    circles = {folder: circle_in(folder_graph(folder, graph)) for folder in sorted(folders)}
    assert not {folder: circle for folder, circle in circles.items() if circle}


def test_a_circle_between_sub_folders_is_found() -> None:
    modules = {"a.b.c": {"a.d.e"}, "a.d.f": {"a.b.g"}, "a.b.g": set(), "a.d.e": set(), "a": {"a.b.c", "a.d.f"}}
    assert not circle_in(modules) and set(circle_in(folder_graph("a", modules))) == {"b", "d"}
    assert not circle_in(folder_graph("a.b", modules))


@pytest.mark.parametrize("part", sorted(RESIDENT_MAY_IMPORT))
def test_imports_inside_resident_go_down_only(part: str) -> None:
    place = f"kt_runtime.resident.{part}"
    modules = {name: found for name, found in module_graph().items() if f"{name}.".startswith(f"{place}.")}
    assert modules
    for name, imported in modules.items():
        others = {found.split(".")[2] for found in imported if found.startswith("kt_runtime.resident.")} - {part}
        assert others <= RESIDENT_MAY_IMPORT[part], f"{name} imports {sorted(others - RESIDENT_MAY_IMPORT[part])}"


def test_a_folder_has_about_a_dozen_files() -> None:
    files = [*(path for _, path in module_files()), *(ROOT / "tests").rglob("*.py")]
    folders = Counter(path.parent for path in files if path.name not in {"__init__.py", "conftest.py"})
    crowded = {str(folder.relative_to(ROOT)): number for folder, number in folders.items() if number > MOST_FILES}
    assert not crowded


def python_tests() -> list[Path]:
    return sorted((ROOT / "tests").rglob("*.py"))


IMPORT_OF_A_TOP_FOLDER = re.compile(rf"^\s*(from\s+|import\s+(.*,\s*)?)({'|'.join(OUTSIDE)})\b", re.MULTILINE)


def test_tests_import_folders_by_their_installed_names() -> None:
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_tests()
        if IMPORT_OF_A_TOP_FOLDER.search(path.read_text())  # without it, half of this file's time is spent on parsing
        for name in imported_names(path)
        if name.split(".")[0] in OUTSIDE
    }
    assert not wrong


@pytest.mark.parametrize("name", sorted(OUTSIDE | {"configs"}))
def test_a_folder_of_the_top_is_a_part_of_the_package(name: str) -> None:
    """A relative link that git keeps: interpreters, type checkers and editors find one source under one name."""
    link = ROOT / "kt_runtime" / name
    assert link.is_symlink() and link.readlink() == Path("..", name)


@pytest.mark.parametrize("name", sorted(OUTSIDE))
def test_a_folder_of_the_top_has_one_name(name: str) -> None:
    """Also where the checkout is on the path, as for `python -m`: two copies of a class break isinstance."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import kt_runtime.{name}; import {name}.no_module_of_it"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert run.returncode == 1 and run.stderr.endswith(f"ImportError: import kt_runtime.{name}, not {name}\n")


def test_every_python_file_belongs_to_a_module_of_the_map() -> None:
    known = {path for _, path in module_files()} | {ROOT / "kt_runtime" / "__init__.py"}
    found = {path for top in ["kt_runtime", *OUTSIDE] for path in (ROOT / top).rglob("*.py")}
    assert found == known


def csrc_files() -> list[Path]:
    return sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".h", ".hpp", ".cpp"})


def wrong_includes(path: Path) -> Iterator[str]:
    part = path.relative_to(ROOT / "csrc").parts[0]
    for include in re.findall(r'^\s*#include\s*["<]([^">]+)[">]', path.read_text(), re.MULTILINE):
        other = include.split("/")[0]
        is_of_csrc = other in CSRC_MAY_INCLUDE and "/" in include
        is_down = other == part or other in CSRC_MAY_INCLUDE[part]
        if (is_of_csrc and not is_down) or (include.startswith("pybind11") and part != "bind"):
            yield f"{path.relative_to(ROOT)} includes {include}"


def test_csrc_includes_go_down_only() -> None:
    files = csrc_files()
    assert files
    wrong = [problem for path in files for problem in wrong_includes(path)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", sorted(OPS_MAY_INCLUDE))
def test_includes_inside_ops_go_down_only(folder: str) -> None:
    files = [path for path in csrc_files() if path.parent == ROOT / "csrc" / "ops" / folder]
    assert files
    for path in files:
        others = set(re.findall(r'#include "ops/([a-z_]+)/', path.read_text())) - {folder}
        assert others <= OPS_MAY_INCLUDE[folder], f"{path.name} includes {sorted(others - OPS_MAY_INCLUDE[folder])}"


def test_every_file_of_ops_has_a_folder_of_the_map() -> None:
    folders = {path.parent.name for path in csrc_files() if path.is_relative_to(ROOT / "csrc" / "ops")}
    assert folders == set(OPS_MAY_INCLUDE)


def test_a_folder_of_csrc_can_be_held_in_the_head() -> None:
    folders = Counter(path.parent for path in csrc_files())
    crowded = {str(folder.relative_to(ROOT)): n for folder, n in folders.items() if n > MOST_FILES_OF_CSRC}
    assert not crowded


def test_no_files_of_csrc_include_each_other_in_a_circle() -> None:
    files = {str(path.relative_to(ROOT / "csrc")): path for path in csrc_files()}
    includes = {
        name: files.keys() & set(re.findall(r'^\s*#include\s*"([^"]+)"', path.read_text(), re.MULTILINE))
        for name, path in files.items()
    }
    assert len(includes["bind/module.cpp"]) >= 2
    assert not circle_in(includes)


def test_no_file_has_more_than_600_lines() -> None:
    sources = [path for _, path in module_files()] + csrc_files() + python_tests()
    sources += [path for path in (ROOT / "tests").rglob("*") if path.suffix in {".h", ".cpp"}]
    long = {str(path.relative_to(ROOT)): n for path in sources if (n := len(path.read_text().splitlines())) > 600}
    assert not long, f"one noun per file: {long}"


# What of SGLang's is named as SGLang spells it: dotted symbols, options, environment variables.
SGLANGS_NAMES = re.compile(r"sglang\.[\w.]+|[\w.-]*cuda[_-]?graph[\w.*-]*|SGLANG_[A-Z_]*CUDA[A-Z_]*")
# Other texts that may name CUDA, with the reason. Code that asks for CUDA stands in device.py alone.
MAY_NAME_CUDA: dict[str, set[str]] = {
    "serve/devices.py": {"cuda"},  # what `--device` calls an NVIDIA GPU
    "kt_runtime/cli/serve.py": {"cpu|cuda|cuda:N"},  # the same
    "serve/options/sglang.py": {"use --device cuda:N"},  # the same
    "sglang_patch/arguments.py": {"cuda"},  # what SGLang's `--device` calls it
    "serve/memory/placement.py": {  # what KTransformers' rules call it
        "cuda",
        " are not supported; use the rules for CPU and CUDA",
    },
    "serve/console/records.py": {  # lines of SGLang's log
        "Cannot detect CUDA architecture",
        "Disable prefill CUDA graph because cuda_graph_config resolved",
    },
}


def docstrings(tree: ast.Module) -> set[int]:
    """Ids of the string nodes that are statements: docstrings of modules, classes, functions and attributes."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def names_of_cuda(path: Path, source: str) -> Iterator[str]:
    if "cuda" not in source.lower():
        return
    tree = parsed(source)
    allowed, skipped = MAY_NAME_CUDA.get(str(path), set()), docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda"):
            yield f"{path}:{node.lineno}: .{node.attr}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
            if any("cuda" in name.split(".") for name in modules):
                yield f"{path}:{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            text = "" if node.value in allowed else SGLANGS_NAMES.sub("", node.value)
            if "cuda" in text.lower():
                yield f"{path}:{node.lineno}: {node.value!r}"


def test_only_device_py_names_cuda() -> None:
    """All other code asks `kt_runtime.device`, and so runs on the emulated accelerator of the tests too."""
    files = [path for part, path in module_files() if part != "device"]
    found = [name for path in files for name in names_of_cuda(path.relative_to(ROOT), path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "import torch\nif torch.cuda.is_available(): pass",
        "def f(x): return x.is_cuda",
        "def f(x): return x.cuda()",
        "from torch.cuda import mem_get_info",
        "from torch import cuda",
        "import torch.cuda as c",
        "def f(x): return x.device.type == 'cuda'",
        "def f(x): return getattr(x, f'cuda:{1}')",
    ],
)
def test_code_that_names_cuda_is_found_in_any_module(code: str) -> None:
    for _, path in module_files()[::40]:
        if str(relative := path.relative_to(ROOT)) not in MAY_NAME_CUDA:
            before = set(names_of_cuda(relative, path.read_text()))
            assert set(names_of_cuda(relative, f"{path.read_text()}\n{code}\n")) - before


def test_what_may_name_cuda_does() -> None:
    """A reason without its text is left out of the list."""
    for name, texts in MAY_NAME_CUDA.items():
        strings = {
            node.value for node in ast.walk(ast.parse((ROOT / name).read_text())) if isinstance(node, ast.Constant)
        }
        assert texts <= strings, f"{name}: {texts - strings}"


def test_python_m_kt_runtime_is_the_command_line() -> None:
    started = subprocess.run([sys.executable, "-P", "-m", "kt_runtime", "--version"], capture_output=True, text=True)
    assert (started.returncode, started.stdout.split()[0]) == (0, "kt-runtime,")
