"""The frontend's adapter operations: calls to the resident, adapter names, and requests in flight.

Both HTTP interfaces, kt-runtime's (`routes.py`) and SGLang's `/load_lora_adapter`, use this module, so that one
validator checks every adapter.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kt_runtime.errors import InvalidValueError, UnknownNameError
from kt_runtime.serve.hosts.shared_copy import shared_copy
from kt_runtime.serve.http.names import NamesServer
from kt_runtime.wire import messages, replies
from kt_runtime.wire.async_client import AsyncResidentClient
from kt_runtime.wire.messages import AnyRequest

STATUS_SECONDS, CHANGE_SECONDS, HASH_SECONDS = 15.0, 300.0, 5.0
LOAD_SECONDS = 3600.0
"""While streams decode, an adapter of 3 GB takes a minute, and longer the longer their steps take."""
MAX_PATH_CHARACTERS = 4096


def _new_id() -> str:
    return f"http-{secrets.token_hex(8)}"


class Adapters:
    """`num_requests` returns the frontend's number of requests in flight, for all adapters and the base.

    `adapter_directory`: the resident's directory of published versions. `has_hosts`: the server has several hosts.
    """

    def __init__(
        self,
        resident: AsyncResidentClient,
        names: NamesServer,
        num_requests: Callable[[], int],
        adapter_directory: str | None = None,
        *,
        has_hosts: bool = False,
    ) -> None:
        self._resident, self._names, self._num_requests = resident, names, num_requests
        self._adapter_directory, self._has_hosts = adapter_directory, has_hosts
        self.registry: Callable[[], dict[str, Any]] | None = None
        """This server as a replica of a registry: its report (`serve/registry/report.py`)."""

    async def status(self, verify_weights: bool = False) -> dict[str, Any]:
        """`verify_weights`: hash the model's weights again, which takes as long as reading them.

        The hash of a large model is empty in the answer until the resident has computed it after its start.
        """
        request = messages.GetStatus(request_id=_new_id(), verify_weights=verify_weights, wait_s=HASH_SECONDS)
        timeout_s = CHANGE_SECONDS if verify_weights else STATUS_SECONDS
        reply = await self._resident.call(request, replies.StatusReply, timeout_s)
        return {
            **_fields(reply),
            "wire_address": self._resident.address,
            "adapter_directory": self._adapter_directory,
            "requests_in_flight": self._num_requests(),
            "adapters": self._names.registry.names(),
            "draining": self._names.draining,
            "registry": None if self.registry is None else self.registry(),
        }

    async def list_all(self) -> list[dict[str, Any]]:
        """The fields of `AdapterInfo`; each version also has `in_flight`, the number of requests that use it."""
        reply = await self._resident.call(
            messages.ListAdapters(request_id=_new_id()), replies.AdaptersReply, STATUS_SECONDS
        )
        adapters = [_fields(info) for info in reply.adapters]
        for version in (version for adapter in adapters for version in adapter["versions"]):
            lora_id = version["lora_id"]
            version["in_flight"] = self._names.registry.num_in_flight(lora_id) if lora_id else 0
        return adapters

    async def show(self, name: str) -> dict[str, Any]:
        adapters = {adapter["name"]: adapter for adapter in await self.list_all()}
        if name not in adapters:
            raise UnknownNameError("adapter", name, adapters)
        return adapters[name]

    async def load(self, name: str, path: str, *, take_over: bool = False) -> dict[str, Any]:
        """Serves the PEFT directory or GGUF file at `path` as `name`. An existing name moves to the new version.

        `take_over`: move the name even if a training session publishes it.
        """
        place, called = absolute_path(path), adapter_name(name)
        self._names.check_name(name)
        async with contextlib.AsyncExitStack() as held:
            if self._has_hosts and self._adapter_directory is not None:
                place = await held.enter_async_context(shared_copy(place, Path(self._adapter_directory)))
            request = messages.LoadAdapter(request_id=_new_id(), name=called, path=place, take_over=take_over)
            return await self._change(request)

    async def follow(self, name: str, path: str, version: str, source: str) -> dict[str, Any]:
        """As `load`, for a version of another server with the content hash `version`. The name's owner stays."""
        self._names.check_name(name)
        return await self._change(
            messages.FollowAdapter(
                request_id=_new_id(), name=adapter_name(name), path=path, adapter_version=version, source=source
            )
        )

    async def rollback(self, name: str, version: str | None) -> dict[str, Any]:
        return await self._change(
            messages.RollbackAdapter(request_id=_new_id(), name=adapter_name(name), adapter_version=version)
        )

    async def unload(self, name: str) -> dict[str, Any]:
        """Removes `name` at once for new requests. Its serving copy is dropped after the last request that uses it.

        A publication in flight may move the name once more during the call; the name is then removed again.
        """
        former = self._names.remove(adapter_name(name))
        try:
            reply = await self._resident.call(
                messages.ForgetAdapter(request_id=_new_id(), name=name), replies.ForgottenReply, CHANGE_SECONDS
            )
        except UnknownNameError:
            if former is None:
                raise
        else:
            if reply.lora_id is not None and self._names.registry.names().get(name) == reply.lora_id:
                former = self._names.remove(name)
        return {"name": name, "in_flight": self._names.registry.num_in_flight(former) if former else 0}

    async def _change(self, request: AnyRequest) -> dict[str, Any]:
        return _fields(await self._resident.call(request, replies.PublishReply, LOAD_SECONDS))


async def drop_adapter(resident: AsyncResidentClient, lora_id: str) -> None:
    await resident.call(messages.DropAdapter(request_id=_new_id(), lora_id=lora_id), replies.DoneReply, CHANGE_SECONDS)


def adapter_name(name: str) -> str:
    try:
        return msgspec.convert(name, messages.Name)
    except msgspec.ValidationError:
        raise InvalidValueError(
            f"adapter name {name[:140]!r}: must be 1 to 128 of A-Z a-z 0-9 _ . -, beginning with a letter or digit"
        ) from None


def absolute_path(path: str) -> str:
    """`path` made absolute, on the server's machine. The resident's workers, not this function, read the file system:
    an unresponsive network mount would block the event loop and every request. Raises InvalidValueError."""
    if not path or "\0" in path or len(path) > MAX_PATH_CHARACTERS:
        raise InvalidValueError(f"adapter path {path[:100]!r}: must be the path of a directory or of a .gguf file")
    return os.path.abspath(path)


def _fields(value: Any) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(value)
    fields.pop("type", None)
    fields.pop("request_id", None)
    return fields
