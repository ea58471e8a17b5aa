"""The multipart body, however it is cut into parts."""

from __future__ import annotations

import io

import pytest

from kt_runtime.errors import InvalidValueError
from kt_runtime.serve.finetuning.upload import Upload

KIND = "multipart/form-data; boundary=xyz"


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    named = f'; filename="{filename}"' if filename is not None else ""
    head = f'--xyz\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'
    return head.encode() + content + b"\r\n"


END = b"--xyz--\r\n"
GOOD = part("purpose", b"fine-tune") + part("file", b"one\r\n--xy\ntwo", "a.jsonl") + END


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_file_arrives_whole(size: int) -> None:
    file = io.BytesIO()
    upload = Upload(KIND, file)
    for start in range(0, len(GOOD), size):
        upload.feed(GOOD[start : start + size])
    assert upload.finish() == "a.jsonl" and file.getvalue() == b"one\r\n--xy\ntwo"


@pytest.mark.parametrize(
    ("given", "kept"), [("../../etc/passwd", "passwd"), ("C:\\\\x\\\\y.jsonl", "y.jsonl"), ("", "file.jsonl")]
)
def test_a_name_is_for_display_and_has_no_path(given: str, kept: str) -> None:
    upload = Upload(KIND, io.BytesIO())
    upload.feed(part("file", b"x", given) + part("purpose", b"fine-tune") + END)
    assert upload.finish() == kept


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("application/json", b"{}", "multipart/form-data"),
        ("multipart/form-data", b"", "with a boundary"),
        (KIND, b"nonsense", "no multipart"),
        (KIND, GOOD[:-10], "ends before its last boundary"),
        (KIND, part("purpose", b"fine-tune") + END, "file is missing"),
        (KIND, part("file", b"x", "a") + END, "purpose is missing"),
        (KIND, part("file", b"x", "a") + part("purpose", b"batch") + END, "purpose 'batch': files are kept for"),
        (KIND, part("file", b"x", "a") + part("purpose", b"fine") + END, "purpose 'fine'; it must be 'fine-tune'"),
        (KIND, part("file", b"x", "a") + part("file", b"x", "a") + END, "'file' twice"),
        (KIND, part("purpose", b"x" * 2000) + END, "more than 1024 bytes"),
        (KIND, part("expires_after[seconds]", b"3600") + END, "until they are deleted"),
        (KIND, part("priority", b"1") + END, "unknown field 'priority'"),
        (KIND, b"--xyz\r\nX: " + b"y" * 5000 + b"\r\n\r\n\r\n" + END, "no multipart"),
    ],
)
def test_a_wrong_body_says_what_is_wrong(kind: str, body: bytes, said: str) -> None:
    def read() -> None:
        upload = Upload(kind, io.BytesIO())
        upload.feed(body)
        upload.finish()

    with pytest.raises(InvalidValueError, match=said.replace("[", r"\[")):
        read()
