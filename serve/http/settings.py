"""The settings of the running server over HTTP: GET and PATCH /kt/settings."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from kt_runtime.wire import messages, replies
from kt_runtime.wire.async_client import AsyncResidentClient

ANSWER_SECONDS = 60.0


class RunningSettings:
    def __init__(self, resident: AsyncResidentClient) -> None:
        self._resident = resident

    async def change(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """All settings, after `changes`, which may be empty. Errors: as of `wire.settings.changed`."""
        request = messages.ChangeSettings(request_id=f"http-{secrets.token_hex(8)}", changes=dict(changes))
        reply = await self._resident.call(request, replies.SettingsReply, ANSWER_SECONDS)
        settings: dict[str, Any] = msgspec.to_builtins(reply.settings)
        return settings
