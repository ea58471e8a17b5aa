"""The Python file of `reward: path/to/file.py:function`, read but not run. `rollouts.reward_function` runs it."""

from __future__ import annotations

import ast
from pathlib import Path

from kt_runtime.errors import InvalidValueError, NotFoundError, UnknownNameError


def check_function(file: Path, function: str) -> None:
    """Reads the file without running it. Raises NotFoundError, InvalidValueError for a file that is not Python, and
    UnknownNameError if no statement of its top level defines or imports `function`."""
    try:
        source = file.read_bytes()
    except OSError as error:
        raise NotFoundError(f"{file}: {error.strerror or error}") from None
    try:
        tree = ast.parse(source, str(file))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise InvalidValueError(f"{file}:{line}: is no Python: {getattr(error, 'msg', error)}") from None
    names = _defined(tree)
    if function not in names:
        raise UnknownNameError("function", function, sorted(names), where=str(file))


def _defined(tree: ast.Module) -> set[str]:
    """Names that the top level defines, assigns or imports, also within `if` and `try`."""
    names: set[str] = set()
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        for field in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                waiting += getattr(node, field, [])
        if isinstance(node, ast.Try):
            waiting += [part for handler in node.handlers for part in handler.body]
    return names
