"""What a finished run leaves beside its log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kt_runtime.train.result_files import model_card, write_results


def test_adapter_tokenizer_and_card_are_written_and_nothing_else(make_recipe: Any, tmp_path: Path) -> None:
    recipe = make_recipe()
    for directory in (recipe.output_dir, tmp_path / "checkpoint", tmp_path / "model"):
        directory.mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors"):
        (tmp_path / "checkpoint" / name).write_text(name)
    for name in ("tokenizer.json", "chat_template.jinja", "config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text(name)
    write_results(recipe, tmp_path / "checkpoint", tmp_path / "model", {"train_loss": 1.5})
    written = {path.name for path in recipe.output_dir.iterdir()}
    adapter = {"adapter_model.safetensors", "adapter_config.json"}
    assert written == {*adapter, "tokenizer.json", "chat_template.jinja", "README.md"}


def test_the_cards_front_matter_is_what_a_hub_reads(make_recipe: Any) -> None:
    card = model_card(make_recipe(stage="dpo", pref_loss="ipo"), {"train_loss": 1.5})
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == "tiny" and yaml.safe_load(front)["library_name"] == "peft"
    assert "DPO (ipo, beta 0.1)" in text and "- train_loss: 1.5" in text and "- lora_rank: 8" in text
