"""A file of unknown kind, read once and looked at from several sides: as text, as one JSON document, as JSON lines."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from functools import cached_property
from pathlib import Path
from typing import Any

from serving.errors import InputError
from serving.files import parse_json


class Source:
    """One input file. Views that the file does not offer are None; reading it at all may raise InputError."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @cached_property
    def text(self) -> str:
        """The whole file (gzip is undone). Raises InputError when it is absent, a directory or no text."""
        if self.path.is_dir():
            raise InputError(str(self.path), "is a directory: name the file in it")
        try:
            raw = self.path.read_bytes()
            return (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
        except OSError as error:
            raise InputError(str(self.path), f"cannot be read: {error.strerror or 'it is no gzip file'}") from None
        except (EOFError, zlib.error) as error:
            raise InputError(str(self.path), f"the gzip data are broken: {error}") from None
        except UnicodeDecodeError:
            raise InputError(str(self.path), "is no text file") from None

    @cached_property
    def document(self) -> dict[str, Any] | None:
        """The file as one JSON object, or None."""
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    @cached_property
    def first_line(self) -> dict[str, Any] | None:
        """The first line as a JSON object, or None: then the file is no JSON lines."""
        line = next((line for line in self.text.splitlines() if line.strip()), "")
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    @cached_property
    def header(self) -> list[str]:
        """The first line as the header of a CSV file."""
        return [name.strip() for name in next(csv.reader(io.StringIO(self.text[:4096])), [])]

    def lines(self) -> list[tuple[int, dict[str, Any]]]:
        """Every JSON line with its number. Raises InputError naming the line that is no JSON object."""
        result = []
        for number, line in enumerate(self.text.splitlines(), 1):
            if not line.strip():
                continue
            value = parse_json(line, str(self.path), first_line=number)
            if not isinstance(value, dict):
                raise InputError(f"{self.path}:{number}", "holds no JSON object")
            result.append((number, value))
        return result

    def csv_rows(self) -> list[tuple[int, dict[str, str]]]:
        """Every row of a CSV file by column, with its line number."""
        return [(number, row) for number, row in enumerate(csv.DictReader(io.StringIO(self.text)), 2)]


def number(record: Any, key: str, where: str, *, at_least: float = 0.0) -> float:
    """Return ``record[key]`` as a finite number of at least ``at_least``. Raises InputError naming ``where`` and the key."""
    value = record.get(key) if isinstance(record, dict) else None
    if value is None:
        raise InputError(where, f"lacks the key '{key}'")
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise InputError(where, f"'{key}' is {value!r}, not a number") from None
    if not at_least <= found < float("inf"):
        raise InputError(where, f"'{key}' is {found:g}", f"it must be at least {at_least:g}")
    return found
