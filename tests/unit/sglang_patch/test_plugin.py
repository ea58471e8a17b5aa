"""The plugin patches all or ends the process; what it says it touches exists."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry

from kt_runtime.errors import ConflictError
from kt_runtime.sglang_patch import plugin, version
from kt_runtime.sglang_patch.frontend import http_server
from kt_runtime.sglang_patch.hooks import LIBRARIES, OTHER_NAMES, OWN_NAMES, Hooks, _hooked, check_applied

PATCHED = [(module, symbol) for module in plugin.PATCHES for symbol in plugin.patch_module(module).SYMBOLS]


def test_another_sglang_version_ends_the_process_and_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "installed_version", lambda: "0.5.22")
    with pytest.raises(SystemExit) as caught:
        plugin.register()
    assert "0.5.22" in str(caught.value)
    assert version.PINNED in str(caught.value)


def test_a_hook_that_did_not_take_is_an_error_that_names_it() -> None:
    check_applied(["a.b", "c.d"], {"a.b", "c.d", "e.f"})
    with pytest.raises(ConflictError, match=r"c\.d"):
        check_applied(["a.b", "c.d"], {"a.b"})


def exists(symbol: str) -> bool:
    try:
        pkgutil.resolve_name(symbol)
    except AttributeError:  # an attribute that instances get
        parent, _, attribute = symbol.rpartition(".")
        return f"self.{attribute}" in inspect.getsource(pkgutil.resolve_name(parent))
    return True


@pytest.mark.slow
def test_every_symbol_that_is_touched_exists(patched_sglang: None) -> None:
    assert PATCHED
    missing = [f"{module}: {symbol}" for module, symbol in PATCHED if not exists(symbol)]
    assert not missing, "\n".join(missing)


class Told(Hooks):
    """Only takes down what would be hooked."""

    def _register(self, target: str, hook: Callable[..., Any], kind: str) -> None:
        self.targets.append(target)


@pytest.mark.slow
def test_modules_of_sglang_hold_a_hooked_function_under_its_own_name_or_a_known_one(patched_sglang: None) -> None:
    """So `Bindings` looks for no other name there, and for none in libraries. Also what is hooked in the frontend only,
    or on a GPU."""
    importlib.import_module("sglang.srt.models.registry")
    importlib.import_module("sglang.srt.entrypoints.http_server")
    own, hooked, registry = set[str](), dict[int, object](), inspect.getsourcefile(HookRegistry)
    on_cpu, on_gpu = Told(on_cpu=True), Told(on_cpu=False)
    for patch in (http_server, *map(plugin.patch_module, plugin.PATCHES)):
        patch.install(on_cpu)
        patch.install(on_gpu)
    for target in {*on_cpu.targets, *on_gpu.targets}:
        owner, found = _hooked(target)
        if isinstance(owner, ModuleType):
            own.add(target.rpartition(".")[2])
        hooked[id(found)] = found
        while isinstance(found, FunctionType) and found.__code__.co_filename == registry:
            found = found.__wrapped__  # type: ignore[attr-defined]  # what the hook replaced
            hooked[id(found)] = found
    held = {
        (key, name)
        for key, module in list(sys.modules.items())
        if key.partition(".")[0] in OWN_NAMES | LIBRARIES and isinstance(module, ModuleType)
        for name, value in list(vars(module).items())
        if id(value) in hooked
    }
    assert not [key for key, _ in held if key.partition(".")[0] in LIBRARIES]
    assert len(held) > 2 * len(own) > 20, "functions are imported by other modules"
    assert {name for _, name in held} - own == OTHER_NAMES


def test_every_patch_says_what_it_touches_and_why() -> None:
    assert plugin.PATCHES
    for module in plugin.PATCHES:
        patch = plugin.patch_module(module)
        assert patch.SYMBOLS, module
        assert all(symbol.startswith("sglang.") for symbol in patch.SYMBOLS), module
        assert "0.5.23" in patch.__doc__, module


@pytest.mark.slow
def test_discovering_the_platform_does_not_import_sglang() -> None:
    code = (
        "import sys; from kt_runtime.sglang_patch import platform, plugin; name = platform.activate(); "
        "print(name, [module for module in sys.modules if module.split('.')[0] == 'sglang'])"
    )
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert out[1:] == ["[]"]
    assert out[0] in ("None", "kt_runtime.sglang_patch.platform:CpuPlatform")
