"""Reads the multipart body of POST /v1/files part by part: the file goes to disk as it arrives."""

from __future__ import annotations

from typing import BinaryIO

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.finetuning.files import PURPOSE
from kt_runtime.serve.requests.checks.checking import shortened

MAX_FIELD_BYTES, MAX_PARTS = 1024, 8
MAX_NAME_CHARACTERS = 255
FIELDS = ("file", "purpose")
UNNAMED = "file.jsonl"
PURPOSES_ELSEWHERE = ("assistants", "batch", "vision", "user_data", "evals")


class Upload:
    """Feed the body's parts in order, then `finish`. Every method raises InvalidValueError."""

    def __init__(self, content_type: str, file: BinaryIO) -> None:
        """`content_type`: the header of the request. `file`: gets the content of the part `file`."""
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise InvalidValueError(
                f"Content-Type {shortened(content_type)}: a file is sent as multipart/form-data with a boundary"
            )
        self._file, self.filename, self._has_file, self._ended = file, UNNAMED, False, False
        self._fields: dict[str, bytearray] = {}
        self._header, self._value, self._headers = b"", b"", dict[bytes, bytes]()
        self._name = ""
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._data,
                "on_end": self._end,
            },
        )

    def feed(self, part: bytes) -> None:
        try:
            self._parser.write(part)
        except MultipartParseError as error:
            raise InvalidValueError(f"the body is no multipart/form-data: {error}") from None

    def finish(self) -> str:
        """The file's name. Raises InvalidValueError for a body that is cut off, and for a wrong purpose."""
        if not self._ended:
            raise InvalidValueError("the body ends before its last boundary")
        if not self._has_file:
            raise InvalidValueError("file is missing: send the JSONL file as the part `file`")
        if "purpose" not in self._fields:
            raise InvalidValueError(f"purpose is missing; it must be {PURPOSE!r}")
        purpose = self._fields["purpose"].decode("utf-8", "replace")
        if purpose != PURPOSE:
            why = ": files are kept for fine-tuning only" if purpose in PURPOSES_ELSEWHERE else ""
            raise InvalidValueError(f"purpose {shortened(purpose)}{why}; it must be {PURPOSE!r}")
        return self.filename

    # What the parser calls.

    def _begin_part(self) -> None:
        self._headers = {}
        if len(self._fields) + self._has_file >= MAX_PARTS:
            raise InvalidValueError(f"the body has more than {MAX_PARTS} parts")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name.startswith("expires_after"):
            raise InvalidValueError("expires_after: files stay until they are deleted; leave it out")
        if self._name not in FIELDS:
            raise InvalidValueError(f"unknown field {shortened(self._name)}; known: {', '.join(FIELDS)}")
        if self._name in self._fields or (self._name == "file" and self._has_file):
            raise InvalidValueError(f"the body has the field {self._name!r} twice")
        if self._name == "file":
            self._has_file = True
            self.filename = _filename(options.get(b"filename", b"").decode("utf-8", "replace"))
        else:
            self._fields[self._name] = bytearray()

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._file.write(data[start:end])
            return
        field = self._fields[self._name]
        field += data[start:end]
        if len(field) > MAX_FIELD_BYTES:
            raise InvalidValueError(f"{self._name} has more than {MAX_FIELD_BYTES} bytes")

    def _end(self) -> None:
        self._ended = True


def _filename(given: str) -> str:
    """For display only: no path is ever made of it."""
    name = "".join(character for character in given if character.isprintable()).replace("\\", "/").rpartition("/")[2]
    return name[:MAX_NAME_CHARACTERS] or UNNAMED
