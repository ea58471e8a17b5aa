"""The Hugging Face cache on this machine, read only: nothing is ever downloaded.

Layout (huggingface_hub): `models--ORG--NAME/refs/main` holds a commit, `snapshots/COMMIT/` has its files as links.
docs/architecture.md says why huggingface_hub's own functions do not look for a snapshot.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from huggingface_hub import constants

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")


def hub_cache_directory() -> Path:
    """Where `hf download` puts models: HF_HUB_CACHE, or what follows from older variables, HF_HOME and the user's cache
    directory. huggingface_hub reads the variables when it is imported."""
    return Path(constants.HF_HUB_CACHE)


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
