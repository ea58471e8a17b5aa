from __future__ import annotations

import json
from pathlib import Path

import pytest
from reference import lora

from kt_runtime.cli.main import main
from kt_runtime.serve.models.checkpoint_files import check_checkpoint
from kt_runtime.serve.models.make_model import make_model


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """LLaMA-Factory's examples/merge_lora/*.yaml with other paths."""
    model = make_model("tiny-qwen3-moe", tmp_path / "model", seed=4)
    config = json.loads((model / "config.json").read_text())
    lora.write_adapter(tmp_path / "adapter", lora.random_adapter(config, rank=2, alpha=4.0, seed=1, only=["attention"]))
    path = tmp_path / "merge.yaml"
    path.write_text(
        "### model\n"
        f"model_name_or_path: {model}\n"
        f"adapter_name_or_path: {tmp_path / 'adapter'}\n"
        "template: qwen3_nothink\n"
        "trust_remote_code: true\n"
        "\n"
        "### export\n"
        f"export_dir: {tmp_path / 'merged'}\n"
        "export_size: 5\n"
        "export_device: cpu  # choices: [cpu, auto]\n"
        "export_legacy_format: false\n"
    )
    return path


def test_a_merge_recipe_of_llama_factory_is_carried_out(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "--recipe", str(recipe)]) == 0
    assert f"is in {tmp_path / 'merged'}" in capsys.readouterr().out
    check_checkpoint(tmp_path / "merged")
    assert (tmp_path / "merged" / "tokenizer.json").exists()
    assert main(["export", "--recipe", str(recipe), f"export_dir={tmp_path / 'again'}"]) == 0
    assert main(["export", "--recipe", str(recipe)]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["adapter_name_or_path", "export_dir"])
def test_what_is_missing_is_named(recipe: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in recipe.read_text().splitlines() if not line.startswith(key)]
    recipe.write_text("\n".join(lines))
    assert main(["export", "--recipe", str(recipe)]) == 2
    assert f"{key} is missing" in capsys.readouterr().err
