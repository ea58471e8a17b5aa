from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from kt_runtime.registry import Registry, open_place

Open = Callable[..., Registry]


@pytest.fixture(params=["directory", "file URL", "object store"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Registries of one place, for any number of replicas."""
    root = tmp_path / "registry"
    root.mkdir()
    urls = {
        "directory": str(root),
        "file URL": root.as_uri(),
        "object store": f"memory://{secrets.token_hex(8)}/registry",
    }
    url = urls[request.param]
    return lambda replica="one", **options: Registry(open_place(url, replica), replica, **options)


@pytest.fixture
def version(tmp_path: Path) -> Callable[[int], Path]:
    """The directory of a version's files; another seed, other files."""

    def make(seed: int) -> Path:
        path = tmp_path / f"version-{seed}"
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text(f'{{"seed": {seed}}}')
        (path / "adapter_model.safetensors").write_bytes(bytes([seed]) * 3_000_000)
        return path

    return make
