"""Servers with the emulated device: every process that they start has it from `import torch` on.

PyTorch loads backends of other packages that name themselves in the entry point `torch.backends`. A folder with the
metadata of such a package, on the path of Python, is enough.
"""

from __future__ import annotations

import os
from pathlib import Path

from device.backend import NAME

TESTS = Path(__file__).resolve().parents[1]
_METADATA = {
    "METADATA": f"Metadata-Version: 2.1\nName: {NAME}-device\nVersion: 0\n",
    "entry_points.txt": f"[torch.backends]\n{NAME} = device.backend:enable\n",
}


def environment(directory: Path, schedule: str = "late", memory_bytes: int = 8 << 30) -> dict[str, str]:
    """Variables for a process that has the device, of so much memory. `directory`: for the package's metadata."""
    package = directory / f"{NAME}_device-0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    for name, text in _METADATA.items():
        (package / name).write_text(text)
    paths = [str(directory), str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        "TORCHDYNAMO_DISABLE": "1",  # the compiler has no code for the device
        "LATE_SCHEDULE": schedule,
        "LATE_MEMORY_BYTES": str(memory_bytes),
        # SGLang 0.5.23 makes its pools on the default stream, and the scheduler replaces tensors of them (the list of
        # free pages) on another stream without a wait. That is right while nothing allocates on the default stream:
        # kt-runtime's threads work on the stream of the scheduler (resident/workers.py).
        "LATE_DEFAULT_STREAM_KEEPS": "1",
    }
