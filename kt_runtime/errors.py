"""Every error that kt-runtime raises on purpose.

    KtError
    ├── UserError            the user's mistake: exit status 2, HTTP 400, never a traceback
    │   ├── UnknownNameError     also a LookupError: a name that is not among the known ones
    │   ├── InvalidValueError    also a ValueError: a value outside what is allowed
    │   ├── NotFoundError        also a FileNotFoundError: a path or model that is not there
    │   ├── AdapterError         also a ValueError: an adapter directory that can't be used as it is
    │   ├── CheckpointError      also a ValueError: model weights that can't be used as they are
    │   ├── ProtocolError        also a ValueError: a wire message that can't be understood
    │   ├── ConflictError        also a RuntimeError: valid by itself, but not in the present state
    │   └── LimitError           also a RuntimeError: more than the server may hold
    └── RuntimeFault         ours: exit status 1, HTTP 500
        ├── ServerUnreachableError   also a ConnectionError
        ├── RequestTimeoutError      also a TimeoutError
        ├── LostRankError            also a ConnectionError: another rank of the model has ended or does not answer
        ├── ServerBusyError          also a RuntimeError: too much in progress, try again later
        └── NumericsError            also an ArithmeticError: NaN or Inf where a number belongs

A message states the problem, the value, the place (such as file:line), what is allowed, and the nearest known name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KtError(Exception):
    """Base of all errors that kt-runtime raises on purpose. `exit_status` is the command line's."""

    exit_status = 1


class UserError(KtError):
    exit_status = 2


class RuntimeFault(KtError):
    exit_status = 1


class UnknownNameError(UserError, LookupError):
    """`kind`: the kind of thing that was looked up ("preset", "loss"). `known`: the names that exist.

    `typed`: False for a name that a program wrote, such as a checkpoint's architecture: no spelling is suggested.
    `note`: a sentence at the end.
    """

    def __init__(
        self, kind: str, name: str, known: Iterable[str], where: str = "", *, typed: bool = True, note: str = ""
    ) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        near = suggestion(name, self.known, near=typed)
        end = f"; {note}" if note else ""
        super().__init__(f"{where + ': ' if where else ''}unknown {kind} {name!r}{near}{end}")


class InvalidValueError(UserError, ValueError):
    pass


class NotFoundError(UserError, FileNotFoundError):
    pass


class AdapterError(UserError, ValueError):
    pass


class CheckpointError(UserError, ValueError):
    pass


class ProtocolError(UserError, ValueError):
    pass


class ConflictError(UserError, RuntimeError):
    pass


class LimitError(UserError, RuntimeError):
    pass


class ServerUnreachableError(RuntimeFault, ConnectionError):
    pass


class RequestTimeoutError(RuntimeFault, TimeoutError):
    pass


class LostRankError(RuntimeFault, ConnectionError):
    pass


class ServerBusyError(RuntimeFault, RuntimeError):
    pass


class NumericsError(RuntimeFault, ArithmeticError):
    pass


def suggestion(name: str, known: Iterable[str], *, near: bool = True) -> str:
    """`; did you mean 'x'? known: a, b, c`; the list of names ends after 20. `near` False leaves out the question."""
    names = sorted(known)
    meant = difflib.get_close_matches(name, names, n=1) if near else []
    hint = f"; did you mean {meant[0]!r}?" if meant else ";"
    listed = ", ".join(names[:20]) + (f", ... ({len(names)} in all)" if len(names) > 20 else "")
    return f"{hint} known: {listed or 'none'}"
