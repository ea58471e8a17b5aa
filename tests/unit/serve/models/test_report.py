from __future__ import annotations

import json
from pathlib import Path

import pytest

from kt_runtime.errors import CheckpointError, NotFoundError
from kt_runtime.serve.models.make_model import make_model
from kt_runtime.serve.models.report import resolve_model

COMMIT = "c" * 40


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_RUNTIME_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cached(places: Path, hub_id: str) -> Path:
    """A tiny checkpoint in the place of a cached one, as links into blobs like Hugging Face's."""
    repository = places / "hub" / f"models--{hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    blobs = make_model("tiny-qwen3-moe", repository / "blobs")
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def test_a_made_preset_is_found_by_name_in_any_case(places: Path) -> None:
    directory = make_model("tiny-qwen3-moe", places / "models" / "tiny-qwen3-moe")
    model = resolve_model("Tiny-Qwen3-MoE")
    assert (model.name, model.directory, model.family.name) == ("tiny-qwen3-moe", directory, "qwen3_moe")
    assert model.preset is not None and model.config == model.preset.config


def test_a_directory_is_found_absolute_relative_and_with_a_presets_name(places: Path) -> None:
    directory = make_model("tiny-deepseek-v3", places / "tiny-deepseek-v3")
    for text in (str(directory), "./tiny-deepseek-v3", directory):
        model = resolve_model(text)
        assert (model.name, model.directory, model.preset) == ("tiny-deepseek-v3", directory, None)
    with pytest.raises(NotFoundError, match="models make tiny-deepseek-v3"):
        resolve_model("tiny-deepseek-v3")


def test_a_cached_repository_is_found_by_hub_id_and_by_preset(places: Path) -> None:
    snapshot = cached(places, "Qwen/Qwen3-30B-A3B")
    by_id, by_preset = resolve_model("Qwen/Qwen3-30B-A3B"), resolve_model("Qwen3-30B-A3B")
    assert by_id.directory == by_preset.directory == snapshot
    assert (by_id.name, by_preset.name) == ("Qwen/Qwen3-30B-A3B", "Qwen3-30B-A3B")
    assert by_id.preset is None and by_preset.preset is not None


def test_what_is_not_found_lists_every_place_looked_at(places: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        resolve_model("DeepSeek-V2-Lite")
    message = str(caught.value)
    for place in (
        "models/DeepSeek-V2-Lite",
        *(f"hub/models--deepseek-ai--DeepSeek-V2-Lite{end}" for end in ("", "-Chat")),
    ):
        assert str(places / place) in message
    assert "hf download deepseek-ai/DeepSeek-V2-Lite-Chat" in message


@pytest.mark.parametrize("text", ["tiny-deepsek-v3", "someone/tiny-deepsek-v3"])
def test_a_misspelt_name_gets_the_nearest_preset(places: Path, text: str) -> None:
    with pytest.raises(
        NotFoundError, match=r"Did you mean 'tiny-deepseek-v3'\? .*Presets: DeepSeek-V2-Lite, "
    ) as caught:
        resolve_model(text)
    assert str(places / text) in str(caught.value)


def test_a_file_is_refused(places: Path) -> None:
    (places / "model.bin").touch()
    with pytest.raises(CheckpointError, match=r"model\.bin: is a file; a model is a directory"):
        resolve_model("model.bin")


def test_a_preset_that_cannot_be_used_is_refused_with_its_note(places: Path) -> None:
    path = cached(places, "moonshotai/Kimi-K2-Instruct") / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(CheckpointError, match=r"'weight_block_size' is None.*Of Kimi-K2: the checkpoint on the hub is"):
        resolve_model("Kimi-K2")


def test_a_reference_to_a_snapshot_that_is_gone_is_not_found(places: Path) -> None:
    snapshot = cached(places, "Qwen/Qwen3-30B-A3B")
    snapshot.rename(snapshot.with_name("d" * 40))
    with pytest.raises(NotFoundError, match="not on this machine"):
        resolve_model("Qwen/Qwen3-30B-A3B")


@pytest.mark.parametrize(
    ("text", "hub_id", "preset"),
    [
        ("DeepSeek-R1", "deepseek-ai/DeepSeek-R1", "DeepSeek-V3"),
        ("deepseek-ai/DeepSeek-V3.1", "deepseek-ai/DeepSeek-V3.1", "DeepSeek-V3"),
        ("Qwen3-Coder-30B-A3B-Instruct", "Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen3-30B-A3B"),
        ("Kimi-K2-Instruct-0905", "moonshotai/Kimi-K2-Instruct-0905", "Kimi-K2"),
        ("Mixtral-8x22B-Instruct-v0.1", "mistralai/Mixtral-8x22B-Instruct-v0.1", "Mixtral-8x7B"),
        ("OLMoE-1B-7B-0125-SFT", "allenai/OLMoE-1B-7B-0125-SFT", "OLMoE-1B-7B"),
        ("DeepSeek-V3.2-Speciale", "deepseek-ai/DeepSeek-V3.2-Speciale", "DeepSeek-V3.2"),
        ("GLM-4.6", "zai-org/GLM-4.6", "GLM-4.5"),
        ("GLM-4.5-Air-Base", "zai-org/GLM-4.5-Air-Base", "GLM-4.5-Air"),
    ],
)
def test_a_model_of_a_presets_architecture_is_told_so_with_its_download(
    places: Path, text: str, hub_id: str, preset: str
) -> None:
    with pytest.raises(NotFoundError) as caught:
        resolve_model(text)
    message = str(caught.value)
    assert f"has the architecture of the preset {preset}" in message and "did you mean" not in message.lower()
    lands = places / "hub" / f"models--{hub_id.replace('/', '--')}"
    assert f"`hf download {hub_id}`, which puts it into {lands}, and pass --model {hub_id}" in message


@pytest.mark.parametrize("text", ["GLM-4.5V", "MiniMaxAI/MiniMax-M3", "DeepSeek-V4-Flash", "Qwen3-32B"])
def test_a_model_of_an_architecture_that_is_not_served_gets_no_download(places: Path, text: str) -> None:
    with pytest.raises(NotFoundError, match=r"is (a dense model|of the architecture \w+), which kt-runtime") as caught:
        resolve_model(text)
    assert "hf download" not in str(caught.value) and "DeepseekV3ForCausalLM" in str(caught.value)


def test_a_hub_id_that_says_nothing_gets_its_download(places: Path) -> None:
    with pytest.raises(NotFoundError, match=r"`hf download someone/some-moe`, which puts it into .*models--someone"):
        resolve_model("someone/some-moe")
