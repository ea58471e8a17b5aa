from __future__ import annotations

import pytest

from kt_runtime.errors import AdapterError, KtError, NumericsError, RuntimeFault, UnknownNameError, UserError
from kt_runtime.wire.codec import FrameError
from kt_runtime.wire.failures import KINDS, MAX_MESSAGE_CHARACTERS, error_from, error_reply
from kt_runtime.wire.replies import ErrorReply


@pytest.mark.parametrize("cls", KINDS.values(), ids=KINDS.keys())
def test_every_class_of_the_tree_survives_the_wire(cls: type[KtError]) -> None:
    error = UnknownNameError("loss", "dpp", ["dpo"]) if cls is UnknownNameError else cls("what was wrong")
    reply = error_reply("c-1", error)
    assert reply.request_id == "c-1"
    assert reply.category == ("user" if issubclass(cls, UserError | NumericsError) else "server")
    back = error_from(reply)
    assert type(back) is cls
    assert str(back) == str(error)


def test_an_exception_of_no_kind_of_ours_is_the_servers_fault() -> None:
    back = error_from(error_reply("c-1", ZeroDivisionError("by zero")))
    assert type(back) is RuntimeFault
    assert str(back) == "unexpected ZeroDivisionError: by zero"


def test_a_subclass_from_elsewhere_becomes_its_nearest_known_class() -> None:
    class RankError(AdapterError):
        pass

    assert error_reply("c-1", RankError("rank")).kind == "AdapterError"
    assert error_reply("c-1", FrameError("magic", "x")).kind == "ProtocolError"


@pytest.mark.parametrize("category, cls", [("user", UserError), ("server", RuntimeFault)])
@pytest.mark.parametrize("kind", ["FromANewerServer", "SystemExit", "os.system", "__class__", ""])
def test_an_unknown_kind_becomes_its_categorys_base(category: str, cls: type[KtError], kind: str) -> None:
    reply = ErrorReply(request_id="", category=category, kind=kind, message="m")  # type: ignore[arg-type]
    assert type(error_from(reply)) is cls


def test_a_long_message_is_cut() -> None:
    assert len(error_reply("c-1", UserError("x" * 10_000)).message) == MAX_MESSAGE_CHARACTERS
