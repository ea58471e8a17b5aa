"""A partly read recipe: checked values, their places, and the problems and notes so far."""

from __future__ import annotations

from typing import Any

from kt_runtime.documents import plain, shown, shown_key
from kt_runtime.train.recipe.fields import DEFAULTS


class Draft:
    """`values`: checked, by the recipe's attribute. `written`: as in the file, by key. `places`: file:line, by key."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.values: dict[str, Any] = {}
        self.written: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []

    def get(self, key: str) -> Any:
        """The checked value; the key's default if the value is missing, wrong or null."""
        value = self.values.get(key)
        return self.default(key) if value is None else value

    @staticmethod
    def default(key: str) -> Any:
        return DEFAULTS[key]

    def is_written(self, key: str) -> bool:
        return key in self.written

    def where(self, key: str) -> str:
        return self.places.get(key, self.source)

    def problem(self, key: str, what: str) -> None:
        value = f"{shown(key, self.written[key])}: " if key in self.written else ""
        self.problems.append(f"{self.where(key)}: {shown_key(key)}: {value}{what}")

    def note(self, key: str, what: str) -> None:
        value = shown(key, self.written.get(key))
        self.notes.append(f"{self.where(key)}: {shown_key(key)}: {value}: {what}")

    def put(self, key: str, value: Any, where: str) -> None:
        """Stores the value as written; nested values lose their places."""
        self.written[key] = plain(value)
        self.places[key] = where
