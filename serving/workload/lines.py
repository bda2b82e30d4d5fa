"""Numbered lines of a text file, gzip or plain, with every way a file can be broken turned into an InputError."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from serving.errors import InputError

MAX_LINE_BYTES = 8_000_000


class Line(NamedTuple):
    """One line: its text without the line end, and ``where``, its file and 1-based number."""

    text: str
    where: str


def numbered(path: Path) -> Iterator[Line]:
    """Yield the lines of ``path`` that are not blank, reading as it goes. Raises InputError."""
    try:
        with path.open("rb") as plain:
            packed = plain.read(2) == b"\x1f\x8b"
            plain.seek(0)
            stream = gzip.GzipFile(fileobj=plain) if packed else plain
            number = 0
            while raw := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                line = _line(raw, f"{path}:{number}", first=number == 1)
                if line.text and not line.text.isspace():
                    yield line
    except OSError as error:
        raise InputError(str(path), f"cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error) as error:
        raise InputError(str(path), f"the gzip data are broken: {error}") from None


def _line(raw: bytes, where: str, *, first: bool) -> Line:
    if len(raw) > MAX_LINE_BYTES:
        raise InputError(where, f"the line is longer than {MAX_LINE_BYTES:,} bytes")
    try:
        text = raw.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError:
        raise InputError(where, "is no UTF-8 text") from None
    return Line(text.rstrip("\r\n"), where)


def csv_fields(line: Line) -> list[str]:
    """Split a CSV line. Raises InputError on broken quotes."""
    if '"' not in line.text:
        return line.text.split(",")
    try:
        return next(csv.reader([line.text], strict=True))
    except csv.Error as error:
        raise InputError(line.where, f"not valid CSV: {error}") from None


def json_object(line: Line) -> dict[str, Any]:
    """Parse a line that holds one JSON object. Raises InputError."""
    try:
        value = json.loads(line.text)
    except (ValueError, RecursionError) as error:
        raise InputError(line.where, f"not valid JSON: {' '.join(str(error).split())[:120]}") from None
    if not isinstance(value, dict):
        raise InputError(line.where, "must hold one JSON object")
    return value
