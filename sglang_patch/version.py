"""The only supported SGLang version: this package uses SGLang's internals, which change with every release."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from kt_runtime.errors import InvalidValueError, NotFoundError

PINNED = "0.5.23"


def check_version(found: str | None = None) -> None:
    """Raises InvalidValueError unless SGLang (`found`, else the installed one) is the pinned version.

    Does not import SGLang: importing another version could fail, because its modules may have moved.
    """
    if found is None:
        found = installed_version()
    if found != PINNED:
        raise InvalidValueError(
            f"SGLang {found} is installed, but this kt-runtime works with SGLang {PINNED} only; "
            f"install it with: pip install sglang=={PINNED}"
        )


def installed_version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        raise NotFoundError(f"SGLang is not installed; install it with: pip install sglang=={PINNED}") from None
