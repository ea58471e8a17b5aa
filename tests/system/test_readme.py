"""README.md's Python runs as it is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from system.conftest import Served

pytestmark = pytest.mark.preset("tiny-deepseek-v3")

README = Path(__file__).resolve().parents[2] / "README.md"
PROMPT = [5, 6, 7, 8]


def test_ten_lines_train_and_publish(float32_server: Served, tmp_path: Path) -> None:
    """In a directory where `tiny` is the served model's, as the text before the lines says."""
    imports, lines = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert 9 <= len(lines.splitlines()) <= 11
    (tmp_path / "ten.py").write_text(imports + lines)
    (tmp_path / "tiny").symlink_to(float32_server.model_directory)
    api = float32_server.api
    before = generate(float32_server, None)
    environment = {**os.environ, "KT_RUNTIME_URL": api.url, "NO_PROXY": "127.0.0.1,localhost"}
    try:
        done = subprocess.run(
            [sys.executable, "ten.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        *steps, version = done.stdout.splitlines()
        losses = [float(line.split()[1]) for line in steps]
        assert len(losses) == 20 and losses[-1] < losses[0] / 2
        assert api.get("/kt/adapters/pebble")["current"] == version
        assert generate(float32_server, "pebble") != before
        assert "lesson" not in [session["session"] for session in api.get("/kt/status")["sessions"]]
    finally:
        api.delete("/kt/adapters/pebble")


def generate(served: Served, adapter: str | None) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "lora_path": adapter}
    tokens: list[int] = served.api.post("/generate", body)["output_ids"]
    return tokens
