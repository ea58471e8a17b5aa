"""Facts about this machine and this installation, for `kt-runtime doctor`. Each function returns JSON-ready values."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kt_runtime import __version__
from kt_runtime.serve.cache_directory import caches_directory
from kt_runtime.serve.memory import machine
from kt_runtime.serve.memory.machine import available_cpu_bytes, huge_pages, total_cpu_bytes
from kt_runtime.serve.models.hub_cache import hub_cache_directory
from kt_runtime.serve.models.report import models_directory
from kt_runtime.sglang_patch.version import PINNED

# CPU features that the kernels or their selection depend on, as spelt in /proc/cpuinfo.
CPU_FEATURES = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16"),
    *("amx_tile", "amx_bf16", "amx_int8"),
)
PYTHON_VERSIONS = ((3, 11), (3, 12))
PACKAGES = ("sglang", "torch", "transformers", "peft", "safetensors", "tokenizers", "pyzmq", "msgspec")
EXACT_VERSIONS = {"sglang": PINNED}
LEADING_VERSIONS = {"peft": "0.21."}


def cpu_facts() -> dict[str, Any]:
    info = _cpuinfo()
    flags = set(info.get("flags", "").split())
    return {
        "model": info.get("model name", platform.processor() or platform.machine()),
        "processors": os.cpu_count(),
        "usable_processors": len(os.sched_getaffinity(0)),
        "features": [feature for feature in CPU_FEATURES if feature in flags],
    }


def extension_facts() -> dict[str, Any]:
    """`isas`: the expert kernels' instruction sets on this machine, best first. `error`: why there are none."""
    try:
        from kt_runtime.experts import available_isas
    except ImportError as error:
        return {"isas": [], "error": str(error)}
    return {"isas": list(available_isas()), "error": None}


def memory_node_facts() -> dict[str, Any]:
    """`nodes`: the memory nodes for a server's expert weights; each matrix is cut into equal parts, one per node.

    `refusal`: why the system would refuse this placement; None for one node. Values that are unknown are None.
    """
    try:
        from kt_runtime.experts.machine import memory_nodes, placement_refusal
    except ImportError:
        return {"nodes": [], "refusal": None}
    found = memory_nodes()
    nodes = [
        {"node": node.number, "processors": list(node.processors), "threads": node.threads, **_node_bytes(node.number)}
        for node in found
    ]
    return {"nodes": nodes, "refusal": placement_refusal(probe=True) if len(found) > 1 else None}


def _node_bytes(number: int) -> dict[str, int | None]:
    """Total and free memory of a node, from /sys/devices/system/node/nodeN/meminfo; None if unknown."""
    found: dict[str, int | None] = {"total_bytes": None, "free_bytes": None}
    try:
        lines = Path(f"/sys/devices/system/node/node{number}/meminfo").read_text().splitlines()
    except OSError:
        return found
    for line in lines:  # "Node 0 MemTotal:       32821280 kB"
        words = line.split()
        for key, name in (("total_bytes", "MemTotal:"), ("free_bytes", "MemFree:")):
            if len(words) > 3 and words[2] == name:
                found[key] = int(words[3]) * 1024
    return found


def memory_facts() -> dict[str, Any]:
    return {"total_bytes": total_cpu_bytes(), "available_bytes": available_cpu_bytes(), "huge_pages": huge_pages()}


def gpu_facts() -> list[dict[str, Any]]:
    """`driver`: its version, "" if unknown."""
    try:
        from kt_runtime import device
    except ImportError:  # torch is missing
        return []
    return [
        {"name": gpu.name, "total_bytes": gpu.total_bytes, "available_bytes": gpu.free_bytes, "driver": gpu.driver}
        for gpu in device.devices()
    ]


def gpu_problem() -> str:
    """Why PyTorch can't use a GPU whose driver is loaded; "" otherwise."""
    try:
        return machine.gpu_problem()
    except ImportError:  # torch is missing, which is a problem of its own
        return ""


def software_facts() -> dict[str, Any]:
    """`packages`: installed version or None. `wanted`: the version that kt-runtime requires, if it requires one."""
    packages = {}
    for name in PACKAGES:
        wanted = EXACT_VERSIONS.get(name) or (f"{LEADING_VERSIONS[name]}*" if name in LEADING_VERSIONS else None)
        packages[name] = {"found": _version(name), "wanted": wanted}
    return {"kt_runtime": __version__, "python": platform.python_version(), "packages": packages}


def disk_facts() -> dict[str, Any]:
    places = {
        "models": models_directory(),
        "hugging_face_cache": hub_cache_directory(),
        "prefix_caches": caches_directory(),
    }
    return {name: {"directory": str(path), "free_bytes": _free_bytes(path)} for name, path in places.items()}


def software_problems(software: dict[str, Any]) -> list[str]:
    problems = []
    if sys.version_info[:2] not in PYTHON_VERSIONS:
        known = " or ".join(".".join(map(str, numbers)) for numbers in PYTHON_VERSIONS)
        problems.append(f"Python is {software['python']}; SGLang {PINNED} needs {known}")
    for name, package in software["packages"].items():
        found, wanted = package["found"], package["wanted"]
        requirement = f"{name}=={wanted}" if wanted else name
        if found is None:
            problems.append(f"{name} is not installed; pip install '{requirement}'")
        elif wanted and not (found == wanted or (wanted.endswith("*") and found.startswith(wanted[:-1]))):
            problems.append(f"{name} is {found}, this kt-runtime needs {wanted}; pip install '{requirement}'")
    return problems


def _cpuinfo() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo."""
    first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _free_bytes(path: Path) -> int:
    """Free space on the file system of `path`, which need not exist."""
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free
