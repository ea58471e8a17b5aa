"""What a finished run leaves beside its log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import yaml
from reference.resident.counting_resident import CountingResident

from kt_runtime.adapters import Reader
from kt_runtime.train.recipe import Recipe
from kt_runtime.train.run.result_files import model_card, write_results


def test_adapter_tokenizer_and_card_are_written_and_nothing_else(
    resident: CountingResident, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = make_recipe()
    recipe.output_dir.mkdir()
    resident.sessions["s"] = {"value": 1.0, "step": 0}
    resident.save("s", str(tmp_path / "checkpoint"))
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors"):
        (resident.model_directory / name).write_text(name)
    loaded = write_results(recipe, tmp_path / "checkpoint", resident.model_directory, {"train_loss": 1.5})
    assert [(reader.num_loaded, reader.num_parameters) for reader in loaded] == [(1, 1)] * 3
    written = {path.name for path in recipe.output_dir.iterdir()}
    adapter = {"adapter_model.safetensors", "adapter_config.json"}
    assert written == {*adapter, "tokenizer.json", "chat_template.jinja", "README.md"}


def test_the_cards_front_matter_is_what_a_hub_reads(make_recipe: Callable[..., Recipe]) -> None:
    reader = Reader("llama.cpp", 1000, 2000, "it has no LoRA for kv_b_proj")
    card = model_card(make_recipe(stage="dpo", pref_loss="ipo"), {"train_loss": 1.5}, [reader])
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == "tiny" and yaml.safe_load(front)["library_name"] == "peft"
    assert "| llama.cpp | 1,000 of 2,000 | it has no LoRA for kv_b_proj |" in text
    assert "DPO (ipo, beta 0.1)" in text and "- train_loss: 1.5" in text and "- lora_rank: 8" in text
