"""Errors over the wire: the server turns an exception into an `ErrorReply`; the client raises the same class again.

The table `KINDS` holds the classes of `kt_runtime.errors`. A kind that is not in the table (from a newer server)
becomes UserError or RuntimeFault, by its category.
"""

from __future__ import annotations

from kt_runtime import errors
from kt_runtime.errors import KtError, NumericsError, RuntimeFault, UnknownNameError, UserError
from kt_runtime.wire.replies import ErrorReply

MAX_MESSAGE_CHARACTERS = 2000

KINDS: dict[str, type[KtError]] = {
    name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, KtError)
}


def error_reply(request_id: str, error: BaseException) -> ErrorReply:
    """The reply that reports `error`. An exception that is not a KtError is reported as the server's RuntimeFault."""
    known = next((cls for cls in type(error).__mro__ if KINDS.get(cls.__name__) is cls), None)
    if known is None:
        kind, message = "RuntimeFault", f"unexpected {type(error).__name__}: {error}"
    else:
        kind, message = known.__name__, str(error)
    # An overflow results from the request's data and settings; a retry would overflow again.
    category = "user" if isinstance(error, UserError | NumericsError) else "server"
    return ErrorReply(
        request_id=request_id,
        category=category,  # type: ignore[arg-type]
        kind=kind,
        message=message[:MAX_MESSAGE_CHARACTERS],
    )


def error_from(reply: ErrorReply) -> KtError:
    """The exception that `reply` reports, ready to be raised."""
    cls = KINDS.get(reply.kind, UserError if reply.category == "user" else RuntimeFault)
    if cls is UnknownNameError:  # its constructor needs fields that `reply` lacks; the message includes their text
        error: KtError = UnknownNameError.__new__(UnknownNameError, reply.message)
        Exception.__init__(error, reply.message)
        vars(error).update(kind="name", name="", known=[])
        return error
    return cls(reply.message)
