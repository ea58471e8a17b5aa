"""A recipe while it is being read: checked values, their places, and what is wrong or worth a line so far."""

from __future__ import annotations

from typing import Any

from kt_runtime.documents import plain, shown, shown_key
from kt_runtime.train.recipe.fields import DEFAULTS


class Draft:
    """`values`: by the recipe's attribute. `written`: the values as written, by key. `places`: by key."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.values: dict[str, Any] = {}
        self.written: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []

    def get(self, key: str) -> Any:
        """The checked value, or the key's default, also where the key is wrong or null."""
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
        """As written; mappings lose their places here."""
        self.written[key] = plain(value)
        self.places[key] = where
