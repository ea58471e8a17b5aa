"""A reward that the user wrote: a Python function, named by file and name (`reward: path/to/file.py:function`).

The file is run in the trainer's process with the trainer's rights, when a run begins, and never in the server. Checking
a recipe reads the file without running it. No file is ever run that the recipe does not name.

    def function(completion: str, prompt: str, answer: str | None, **columns) -> float

The function gets what it asks for by name: `completion`, the sampled text; `prompt`, the question's text; `answer`, the
dataset's answer; and any column of the row, all others with `**columns`. A column called completion, prompt or answer
does not replace these.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kt_runtime.errors import InvalidValueError
from kt_runtime.train.examples import Prompt

GIVEN = ("completion", "prompt", "answer")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class UserReward:
    """Runs the file. Raises InvalidValueError for what the file raises, and for a name that is no function."""

    def __init__(self, file: Path, function: str) -> None:
        self._file, self._name = file.resolve(), function
        self._function = self._load()
        try:
            self._parameters: Mapping[str, inspect.Parameter] = inspect.signature(self._function).parameters
        except (TypeError, ValueError):
            self._parameters = {}
        kinds = [parameter.kind for parameter in self._parameters.values()]
        self._takes_all = inspect.Parameter.VAR_KEYWORD in kinds or not self._parameters

    def check(self, prompt: Prompt) -> None:
        known = {*GIVEN, *prompt.columns}
        for name, parameter in self._parameters.items():
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                raise InvalidValueError(f"{self._place()}: {self._name}: {name}: parameters are given by name")
            if parameter.kind in _BY_NAME and parameter.default is parameter.empty and name not in known:
                listed = ", ".join(sorted(map(str, known)))
                raise InvalidValueError(
                    f"{self._place()}: {self._name} asks for {name!r}, which row {prompt.where} lacks; it has {listed}"
                )

    def __call__(self, completion: str, prompt: Prompt) -> float:
        values = {**prompt.columns, "completion": completion, "prompt": prompt.question, "answer": prompt.answer}
        if not self._takes_all:
            values = {name: value for name, value in values.items() if name in self._parameters}
        try:
            result = self._function(**values)
        except Exception as error:
            raise InvalidValueError(f"{self._line(error)}: {self._said(error)}; row {prompt.where}") from error
        return self._checked(result, completion, prompt)

    def _checked(self, result: Any, completion: str, prompt: Prompt) -> float:
        if isinstance(result, numbers.Real):
            value = float(result)
            if math.isfinite(value):
                return value
        raise InvalidValueError(
            f"{self._place()}: {self._name} returned {str(result)[:80]!r} ({type(result).__name__}); a reward is a "
            f"finite number; row {prompt.where}, completion {completion[:80]!r}"
        )

    def _load(self) -> Callable[..., Any]:
        specification = importlib.util.spec_from_file_location(f"kt_runtime_reward_{self._file.stem}", self._file)
        assert specification is not None and specification.loader is not None, "the name ends in .py"
        module = importlib.util.module_from_spec(specification)
        sys.modules[specification.name] = module  # dataclasses and pickles of the file look it up there
        try:
            specification.loader.exec_module(module)
        except Exception as error:
            raise InvalidValueError(f"{self._line(error)}: {self._said(error)}") from error
        function = getattr(module, self._name, None)
        if not callable(function):
            raise InvalidValueError(f"{self._file}: {self._name} is {function!r}, not a function")
        return function  # type: ignore[no-any-return]

    def _said(self, error: Exception) -> str:
        return f"{self._name} raised {type(error).__name__}: {error}".rstrip(": ")

    def _line(self, error: Exception) -> str:
        """file:line of the last line of the user's file that was running."""
        if isinstance(error, SyntaxError) and error.filename == str(self._file):
            return f"{self._file}:{error.lineno}"
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(self._file)]
        return f"{self._file}:{lines[-1]}" if lines else str(self._file)

    def _place(self) -> str:
        """file:line of the function, or the file."""
        code = getattr(self._function, "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else str(self._file)
