from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kt_runtime.sglang_patch.hooks import Hooks
from kt_runtime.sglang_patch.lora.pinned_memory import UnpinnedMemory, install, without_pinned_memory


def test_pinning_gives_the_same_tensor_back() -> None:
    tensor = torch.arange(3)
    with UnpinnedMemory():
        assert tensor.pin_memory() is tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, pin_memory=True),
        lambda: torch.empty((2,), dtype=torch.int32, pin_memory=True),
        lambda: torch.tensor([1, 2], pin_memory=True, device="cpu"),
        lambda: torch.full((2,), 1.0, pin_memory=True),
    ],
)
def test_factories_do_not_pin(make: Callable[[], torch.Tensor]) -> None:
    with UnpinnedMemory():
        assert not make().is_pinned()


def test_other_arguments_arrive() -> None:
    with UnpinnedMemory():
        made = torch.zeros((2, 3), dtype=torch.float64, pin_memory=True)
    assert made.shape == (2, 3)
    assert made.dtype == torch.float64


def test_the_wrapped_call_gets_its_arguments_and_gives_its_result() -> None:
    result = without_pinned_memory(lambda *args, **kwargs: (args, kwargs), 1, two=2)
    assert result == ((1,), {"two": 2})


def test_nothing_is_patched_where_there_is_a_gpu() -> None:
    hooks = Hooks(on_cpu=False)
    install(hooks)
    assert hooks.targets == []
