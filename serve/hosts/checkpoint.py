"""A fingerprint of a checkpoint's files that takes seconds, also of a terabyte, computed before anything is loaded.

It covers config.json and the index by their content, and each file of weights by its name, its size, its header and
`SAMPLES` blocks at equal distances. Two copies of one checkpoint have the same; another model, another revision and a
file that was cut off have another one. A byte that changed between two samples is not seen: the fingerprint of all
weights (`resident/fingerprint.py`) sees it, and takes a pass over them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from kt_runtime.files import errors_of_path

SAMPLES = 16
SAMPLE_BYTES = 64 << 10
WHOLE = ("config.json", "model.safetensors.index.json")
WEIGHTS = (".safetensors", ".gguf")


def sampled_fingerprint(directory: Path) -> str:
    """64 hexadecimal digits. Raises InvalidValueError for a file that can't be read."""
    digest = hashlib.sha256(b"kt-runtime checkpoint files 1")
    for name in WHOLE:
        if (path := directory / name).exists():
            with errors_of_path(path, "read"):
                content = json.dumps(json.loads(path.read_bytes()), sort_keys=True)
            digest.update(f"{name}:{content};".encode())
    for path in sorted(path for path in directory.iterdir() if path.suffix in WEIGHTS):
        with errors_of_path(path, "read"):
            digest.update(path.name.encode() + b":" + _sampled(path))
    return digest.hexdigest()


def _sampled(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size};".encode())
    with path.open("rb") as opened:
        header = opened.read(8)
        digest.update(header + opened.read(min(int.from_bytes(header, "little"), 64 << 20, size)))
        for sample in range(SAMPLES):
            opened.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            digest.update(opened.read(SAMPLE_BYTES))
    return digest.digest()
