"""ExpertStore.load: what it accepts, and what it says about what it refuses."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import moe, quantized
from reference.expert_problems import per_expert_tensors
from reference.instruction_sets import instruction_sets
from reference.moe import ReferenceExperts
from safetensors.torch import save_file
from torch import Tensor

from kt_runtime import _experts
from kt_runtime.errors import CheckpointError, ConflictError, InvalidValueError, NotFoundError, UnknownNameError
from kt_runtime.experts import ExpertShape, ExpertStore, available_isas
from kt_runtime.experts import store as store_module
from kt_runtime.experts.machine import default_threads, usable_processors

SHAPE = ExpertShape(num_experts=3, hidden=40, intermediate=24)
KEY = "model.layers.1.mlp.experts"


@pytest.fixture
def experts() -> ReferenceExperts:
    return moe.random_experts(SHAPE.num_experts, SHAPE.hidden, SHAPE.intermediate, seed=3)


@pytest.fixture
def tensors(experts: ReferenceExperts) -> dict[str, Tensor]:
    return per_expert_tensors(experts, KEY)


def load(directory: Path, **options: Any) -> ExpertStore:
    return ExpertStore.load(directory, {1: KEY}, SHAPE, **options)


def assert_holds(store: ExpertStore, experts: ReferenceExperts) -> None:
    for e in range(SHAPE.num_experts):
        for got, wanted in zip(store.layers[1].unpacked(e), (experts.gate, experts.up, experts.down), strict=True):
            assert torch.equal(got, wanted[e])


def test_one_file_with_a_key_per_expert(tmp_path: Path, experts: ReferenceExperts, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    assert_holds(load(tmp_path), experts)


def test_shards_with_an_index(tmp_path: Path, experts: ReferenceExperts, tensors: dict[str, Tensor]) -> None:
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_holds(load(tmp_path), experts)


def test_fused_keys(tmp_path: Path, experts: ReferenceExperts) -> None:
    fused = {
        f"{KEY}.gate_up_proj": torch.cat([experts.gate, experts.up], dim=1),
        f"{KEY}.down_proj": experts.down.clone(),
    }
    save_file(fused, tmp_path / "model.safetensors")
    assert_holds(load(tmp_path), experts)


@pytest.mark.parametrize("share", [range(1), range(1, 3), range(2, 3)])
@pytest.mark.parametrize("expert_format", [None, "int8"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_share_of_the_experts_is_read_and_held_alone(
    tmp_path: Path,
    experts: ReferenceExperts,
    tensors: dict[str, Tensor],
    share: range,
    expert_format: str | None,
    is_fused: bool,
) -> None:
    fused = {
        f"{KEY}.gate_up_proj": torch.cat([experts.gate, experts.up], dim=1),
        f"{KEY}.down_proj": experts.down.clone(),
    }
    save_file(fused if is_fused else tensors, tmp_path / "model.safetensors")
    whole = load(tmp_path, expert_format=expert_format)
    part = load(tmp_path, expert_format=expert_format, share=share)
    assert (part.shape.num_experts, part.first_expert) == (len(share), share.start)
    assert part.resident_bytes * SHAPE.num_experts == whole.resident_bytes * len(share)
    for own, number in enumerate(share):
        for got, wanted in zip(part.layers[1].unpacked(own), whole.layers[1].unpacked(number), strict=True):
            assert torch.equal(got, wanted)
    with pytest.raises(InvalidValueError, match=f"expert {len(share)} is out of range"):
        part.layers[1].unpacked(len(share))


def test_shares_have_fingerprints_of_their_own(tmp_path: Path, experts: ReferenceExperts) -> None:
    gate, up, down = (one[:1].expand_as(one).clone() for one in (experts.gate, experts.up, experts.down))
    same = ReferenceExperts(gate, up, down)
    save_file(per_expert_tensors(same, KEY), tmp_path / "model.safetensors")
    found = [load(tmp_path, share=share).fingerprint() for share in (range(1), range(1, 2), range(3))]
    assert len(set(found)) == 3 and found[2] == load(tmp_path).fingerprint()


@pytest.mark.parametrize(("share", "problem"), [(range(2, 5), "experts 2 to 4 are no part of 3"), (range(0), "is 0")])
def test_a_share_beyond_the_experts_is_refused(
    tmp_path: Path, tensors: dict[str, Tensor], share: range, problem: str
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidValueError, match=problem):
        load(tmp_path, share=share)


def test_figures_and_progress(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    seen = []
    store = load(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 1)]
    assert store.weight_bytes == 3 * 3 * 40 * 24 * 2
    # Rows round up to 16, columns to 32: gate and up 32 x 64, down 48 x 32.
    assert store.resident_bytes == 3 * (2 * 32 * 64 + 48 * 32) * 2
    assert store.format == "bf16"
    assert store.isa == available_isas()[0]
    assert store.num_threads >= 1


def test_weights_are_spread_over_memory_nodes(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    for num_nodes in (1, 2, 3):
        store = load(tmp_path, num_nodes=num_nodes)
        assert len(store.node_bytes) == num_nodes and sum(store.node_bytes) == store.resident_bytes
    assert min(load(tmp_path, num_nodes=2).node_bytes) > 0


def test_a_refused_placement_is_said_once_with_its_errno(
    tmp_path: Path, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr(store_module, "_warned", False)
    load(tmp_path)
    assert not caplog.records
    monkeypatch.setattr(_experts, "placement_counts", lambda: (0, 2, errno.EPERM))
    for _ in range(2):
        load(tmp_path)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "mbind was refused 2 times, at last with errno 1 (EPERM: Operation not permitted)" in caplog.text


def test_by_default_there_is_a_thread_for_each_core_and_no_more(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    assert load(tmp_path).num_threads == default_threads() <= usable_processors()


def test_fingerprint_tells_weights_apart_and_not_instruction_sets_or_memory_nodes(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    prints = {load(tmp_path, isa=isa, num_nodes=nodes).fingerprint() for isa in instruction_sets() for nodes in (1, 2)}
    assert len(prints) == 1 and len(prints.copy().pop()) == 64
    name = f"{KEY}.2.down_proj.weight"
    tensors[name][39, 23] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    assert load(tmp_path).fingerprint() not in prints


def test_closed_store_refuses(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    store = load(tmp_path)
    layer = store.layers[1]
    store.close()
    store.close()
    with pytest.raises(ConflictError, match="closed"):
        layer.forward(torch.zeros(1, 40), torch.zeros(1, 1).int(), torch.ones(1, 1))
    with pytest.raises(ConflictError, match="closed"):
        store.fingerprint()


def test_calls_from_several_threads_agree(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    layer = load(tmp_path, num_threads=2).layers[1]
    x, ids = torch.randn(400, 40), torch.randint(0, 3, (400, 2))
    weights = torch.rand(400, 2)
    wanted = layer.forward(x, ids, weights)
    results: list[Any] = []
    workers = [
        threading.Thread(target=lambda: results.extend(layer.forward(x, ids, weights) for _ in range(20)))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 80 and all(torch.equal(result, wanted) for result in results)


BUFFER_BYTES = 4 << 20  # strips of two threads: they do not grow with the layer, and these layers are small
LOAD_AND_MEASURE = """
import ctypes, json, re, sys
from pathlib import Path
from kt_runtime.experts import ExpertShape, ExpertStore

def status_bytes(name):
    return int(re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1)) * 1024

def load(directory, expert_format, sizes):
    return ExpertStore.load(Path(directory), {0: "m"}, ExpertShape(*sizes), num_threads=2, expert_format=expert_format)

for directory, expert_format, sizes in json.load(sys.stdin):
    load(directory, expert_format, [2, *sizes[1:]])  # threads and their stacks are there afterwards
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status_bytes("VmRSS")
    store = load(directory, expert_format, sizes)
    print(json.dumps([store.weight_bytes, store.resident_bytes, status_bytes("VmHWM") - before]))
    store.close()
"""


@pytest.mark.slow
def test_loading_needs_little_more_memory_than_the_weights(tmp_path: Path) -> None:
    """In a process of its own, where nothing else allocates. The bar: at most 1.1 times the weights' bytes."""
    one = moe.random_experts(1, 768, 512)
    cases = []
    for scheme, expert_format in [
        ("bf16", None),
        ("fp8", None),
        ("int4_g32", None),
        ("awq_g128", None),
        ("bf16", "int4"),
    ]:
        directory, num_experts = tmp_path / scheme, 40 if scheme == "bf16" else 80
        cases.append((str(directory), expert_format, (num_experts, 768, 512)))
        if directory.exists():
            continue
        directory.mkdir()
        tensors, _ = quantized.checkpoint_tensors(one, scheme, "m")
        copies = {
            key.replace("m.0.", f"m.{e}."): tensor.clone()
            for key, tensor in tensors.items()
            for e in range(num_experts)
        }
        save_file(copies, directory / "model.safetensors")
        quantized.write_config(directory, scheme)
    done = subprocess.run(
        [sys.executable, "-c", LOAD_AND_MEASURE],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    for case, line in zip(cases, done.stdout.splitlines(), strict=True):
        weight_bytes, resident_bytes, extra_bytes = json.loads(line)
        assert extra_bytes >= 0.9 * resident_bytes, case  # it was measured
        assert extra_bytes <= 1.1 * weight_bytes + BUFFER_BYTES, (case, extra_bytes / weight_bytes)


def test_unknown_instruction_set_lists_the_available(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnknownNameError, match=r"unknown instruction set for this machine 'avx3'.*portable"):
        load(tmp_path, isa="avx3")


@pytest.mark.parametrize("num_threads", [0, -1])
def test_thread_count_must_be_positive(tmp_path: Path, num_threads: int) -> None:
    with pytest.raises(InvalidValueError, match="num_threads"):
        load(tmp_path, num_threads=num_threads)


def test_missing_directory_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"model\.safetensors\.index\.json nor model\.safetensors"):
        load(tmp_path / "nothing")


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{KEY}.1.up_proj.weight"]


def reshape(tensors: dict[str, Tensor]) -> None:
    tensors[f"{KEY}.1.up_proj.weight"] = torch.zeros(24, 41, dtype=torch.bfloat16)


def retype(tensors: dict[str, Tensor]) -> None:
    tensors[f"{KEY}.0.gate_proj.weight"] = torch.zeros(24, 40, dtype=torch.float64)


def retype_other(tensors: dict[str, Tensor]) -> None:
    tensors[f"{KEY}.2.up_proj.weight"] = torch.zeros(24, 40, dtype=torch.float64)


def empty(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[name.replace("experts", "specialists")] = tensors.pop(name)


def poison(tensors: dict[str, Tensor]) -> None:
    tensors[f"{KEY}.2.down_proj.weight"][39, 23] = float("nan")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop, r"tensor 'model.layers.1.mlp.experts.1.up_proj.weight' is missing"),
        (reshape, r"1.up_proj.weight' has shape \[24, 41\], expected \[24, 40\]"),
        (retype, r"0.gate_proj.weight' has dtype F64, expected BF16, F16, F32, F8_E4M3, I8 or U8; supported: bfloat16"),
        (retype_other, r"2.up_proj.weight' has dtype F64, expected BF16"),
        (empty, r"no experts under 'model.layers.1.mlp.experts': tensor '.*0.gate_proj.weight' is missing"),
        (poison, r"2.down_proj.weight' holds NaN or Inf at element 959"),
    ],
)
def test_unfit_tensors_are_named(
    tmp_path: Path, tensors: dict[str, Tensor], spoil: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_broken_header_is_refused_with_its_file(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 6]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"123456")
    with pytest.raises(CheckpointError, match=rf"^{path}: 'a' has 6 bytes; shape \[4\] of BF16 needs 8"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.999])
def test_truncated_checkpoint_is_refused(tmp_path: Path, tensors: dict[str, Tensor], keep: float) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(CheckpointError):
        load(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not JSON"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "not a file name in this directory"),
        ('{"weight_map": {"a": 3}}', "shard of 'a' is '3', not a file name in this directory"),
        ('{"weight_map": {"a": ".."}}', "shard of 'a' is '..', not a file name in this directory"),
        ('{"weight_map": {"a": "model.safetensors", "a": "other"}}', "not JSON: the name 'a' appears twice"),
        ('{"weight_map": {"a": "model.safetensors"}}', "tensor 'a' is missing, though the index places it here"),
    ],
)
def test_broken_index_is_refused(tmp_path: Path, tensors: dict[str, Tensor], index: str, message: str) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_pipe_for_weights_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    refused = []

    def attempt() -> None:
        try:
            load(tmp_path)
        except CheckpointError as error:
            refused.append(str(error))

    loader = threading.Thread(target=attempt, daemon=True)  # waiting for the pipe must not hang the tests
    loader.start()
    loader.join(30)
    assert refused == [
        f"{tmp_path}/model.safetensors: can't be read: is a pipe, socket or device; expected a regular file"
    ]


def one_tensor_checkpoint(path: Path, descriptor: int) -> Any:
    checkpoint = _experts.Checkpoint(str(path.parent), None)
    checkpoint.add_file(str(path), descriptor, {"m.0.gate_proj.weight": ("BF16", (2, 3), 10, 22)})
    for name in ("up_proj", "down_proj"):
        shape = (3, 2) if name == "down_proj" else (2, 3)
        checkpoint.add_file(str(path), descriptor, {f"m.0.{name}.weight": ("BF16", shape, 10, 22)})
    return checkpoint


@pytest.mark.parametrize(
    ("flags", "size", "message"),
    [
        (os.O_WRONLY, 22, "can't read 12 bytes at byte 10: Bad file descriptor"),
        (os.O_RDONLY, 15, "can't read 7 bytes at byte 15: the file ends there: truncated while open"),
    ],
)
def test_a_read_that_fails_says_where_and_why(tmp_path: Path, flags: int, size: int, message: str) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(size))
    descriptor = os.open(path, flags)
    checkpoint = one_tensor_checkpoint(path, descriptor)
    os.close(descriptor)  # the checkpoint keeps its own
    with pytest.raises(_experts.NativeError) as refused:
        _experts.load_layer(
            checkpoint=checkpoint,
            prefix="m",
            num_experts=1,
            hidden=3,
            intermediate=2,
            mlp=("silu", 0, 0, False, False, False),
            isa="portable",
            num_threads=1,
            expert_format="",
            num_nodes=1,
            share=(0, 1),
        )
    assert refused.value.args == ("bad_checkpoint", f"{path}: {message}")


def test_a_closed_descriptor_is_named(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    os.close(descriptor)
    with pytest.raises(_experts.NativeError, match="weights: can't be kept open: Bad file descriptor"):
        one_tensor_checkpoint(tmp_path / "weights", descriptor)


def test_missing_shard_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(NotFoundError, match=r"gone\.safetensors: No such file"):
        load(tmp_path)
