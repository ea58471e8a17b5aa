"""Compiles the emulated device once for each state of its sources and version of PyTorch, into build/device."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sysconfig
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "late"
CACHE = Path(__file__).resolve().parents[2] / "build" / "device"
# -O1: the device's work is PyTorch's own, and at -O2 compiling takes half as long again.
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-unused-function"]


def built_library() -> Path:
    """The shared library; compiled if there is none of these sources. Safe in several processes at once."""
    place = CACHE / f"late-{_key()}.so"
    if not place.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with (CACHE / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():
                _compile(place)
    return place


def _key() -> str:
    digest = hashlib.sha256(f"{torch.__version__} {sysconfig.get_platform()} {_compiler()} {FLAGS}".encode())
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def _compile(place: Path) -> None:
    package = Path(torch.__file__).parent
    include = ["-isystem", str(package / "include"), "-isystem", str(package / "include/torch/csrc/api/include")]

    # All in one: reading PyTorch's headers takes most of a compiler's time, and eight sources would have them read
    # eight times.
    together = "".join(f'#include "{source}"\n' for source in sorted(SOURCES.glob("*.cpp")))
    target = place.with_suffix(".o")
    _run([_compiler(), *FLAGS, *include, "-x", "c++", "-c", "-", "-o", str(target)], text=together)
    libraries = package / "lib"
    linked = place.with_suffix(".new")
    where = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-lc10"]
    _run([_compiler(), "-shared", str(target), "-o", str(linked), *where])
    linked.rename(place)
    target.unlink()


def _run(command: list[str], text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the emulated device does not compile: {' '.join(command)}\n{done.stderr}")
