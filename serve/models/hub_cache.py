"""The Hugging Face cache on this machine, read only: nothing is ever downloaded.

Layout (huggingface_hub): `models--ORG--NAME/refs/main` holds a commit, `snapshots/COMMIT/` has its files as links.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")


def hub_cache_directory() -> Path:
    """HF_HUB_CACHE, or `hub` in HF_HOME, or `huggingface/hub` in the user's cache directory."""
    if explicit := os.environ.get("HF_HUB_CACHE"):
        return Path(explicit).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return user_cache_directory() / "huggingface" / "hub"


def user_cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def is_hub_id(text: str) -> bool:
    return HUB_ID.fullmatch(text) is not None


def repository_directory(hub_id: str) -> Path:
    return hub_cache_directory() / f"models--{hub_id.replace('/', '--')}"


def find_snapshot(hub_id: str) -> Path | None:
    """The snapshot that `refs/main` names, else the only snapshot in the cache; None if neither exists."""
    repository = repository_directory(hub_id)
    reference = repository / "refs" / "main"
    if reference.is_file():
        commit = reference.read_text().strip()
        snapshot = repository / "snapshots" / commit
        return snapshot if COMMIT.fullmatch(commit) and snapshot.is_dir() else None
    snapshots = [entry for entry in (repository / "snapshots").glob("*") if entry.is_dir()]
    return snapshots[0] if len(snapshots) == 1 else None
