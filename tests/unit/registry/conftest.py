from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kt_runtime.registry import Registry, open_place

Open = Callable[..., Registry]


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The URL of a new bucket of a server in this process that speaks S3's protocol (moto). Skipped without it."""
    moto = pytest.importorskip("moto.server", reason="moto is not installed (pip install kt-runtime[test])")
    s3fs = pytest.importorskip("s3fs")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    given = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**given, "AWS_DEFAULT_REGION": "us-east-1", "NO_PROXY": host}.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem().mkdir("registries")
        yield "s3://registries"
    server.stop()


@pytest.fixture(params=["directory", "file URL", "object store", "S3"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Registries of one place, for any number of replicas."""
    root = tmp_path / "registry"
    root.mkdir()
    urls = {
        "directory": str(root),
        "file URL": root.as_uri(),
        "object store": f"memory://{secrets.token_hex(8)}/registry",
    }
    if request.param == "S3":
        urls["S3"] = f"{request.getfixturevalue('s3')}/{secrets.token_hex(8)}"
    url = urls[request.param]
    return lambda replica="one", **options: Registry(open_place(url, replica), replica, **options)


@pytest.fixture
def version(tmp_path: Path) -> Callable[[int], Path]:
    """The directory of a version's files; another seed, other files."""

    def make(seed: int) -> Path:
        path = tmp_path / f"version-{seed}"
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text(f'{{"seed": {seed}}}')
        (path / "adapter_model.safetensors").write_bytes(bytes([seed]) * 1_100_000)  # read in two pieces
        return path

    return make
