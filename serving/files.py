"""Files that a user names, read with a bound and written whole: everything a disk or a text can do wrong is an InputError.

Facts (catalogue entries, fits, constraints, a run's ``run.yaml``) are YAML with dates and numbers as keys, which scenarios refuse;
``read_yaml`` takes those, and still neither aliases, which grow without bound, nor keys given twice.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from serving.errors import InputError

MAX_BYTES = 16_000_000
MAX_DEPTH = 64


def read_text(path: Path) -> str:
    """Read a text file of UTF-8, of bounded size; a device that never ends counts as too large. Raises InputError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise InputError(str(path), f"the file is larger than {MAX_BYTES:,} bytes")
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(str(path), f"is not text: no UTF-8 from byte {error.start}") from None
    except OSError as error:
        raise InputError(str(path), f"cannot be read: {error.strerror}") from None


def read_yaml(path: Path) -> Any:
    """Read one YAML document of facts. Raises InputError naming the file and the line."""
    import yaml

    text = read_text(path)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_events(yaml.parse(text, Loader=loader), str(path))
        return yaml.load(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise InputError(f"{path}:{mark.line + 1}" if mark else str(path), f"is not valid YAML: {error.problem or error.context}") from None
    except InputError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # a date that no calendar has, a number of 5,000 digits
        raise InputError(str(path), f"is not valid YAML: {' '.join(str(error).split())[:160]}") from None


def _check_events(events: Iterator[Any], name: str) -> None:
    import yaml

    stack: list[set[str] | None] = []  # the keys of each open mapping; None for a list
    expects_key: list[bool] = []
    for event in events:
        where = f"{name}:{event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise InputError(where, "anchors and aliases (& and *) are not supported here: write the value out")
        if isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            stack.pop()
            expects_key.pop()
        elif isinstance(event, yaml.ScalarEvent | yaml.MappingStartEvent | yaml.SequenceStartEvent):
            if stack and stack[-1] is not None:
                if expects_key[-1] and isinstance(event, yaml.ScalarEvent):
                    if event.value in stack[-1]:
                        raise InputError(where, f"key '{event.value[:80]}' is given twice")
                    stack[-1].add(event.value)
                expects_key[-1] = not expects_key[-1]
            if not isinstance(event, yaml.ScalarEvent):
                if len(stack) >= MAX_DEPTH:
                    raise InputError(where, f"nested deeper than {MAX_DEPTH} levels")
                stack.append(set() if isinstance(event, yaml.MappingStartEvent) else None)
                expects_key.append(True)


def parse_json(text: str, where: str, *, first_line: int = 1) -> Any:
    """Parse JSON. Raises InputError naming ``where`` and the line, also for what the parser can't hold: depth, digits."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}:{error.lineno + first_line - 1}", f"is not JSON: {error.msg}", "the file may be cut short") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}:{first_line}", f"is not JSON that can be read: {str(error)[:80]}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises InputError."""
    value = parse_json(read_text(path), str(path))
    if not isinstance(value, dict):
        raise InputError(str(path), "must hold one JSON object")
    return value


@contextlib.contextmanager
def whole_file(path: Path, hint: str = "") -> Iterator[IO[bytes]]:
    """Open a file that appears under ``path`` when the block ends, or not at all: until then what stood there stays.

    Folders above it are made. A device or a pipe can't be replaced: it is written straight to. Raises InputError, with ``hint``, when the
    disk refuses.
    """
    partial = path.parent / f".{path.name[:200]}.partial"
    try:
        if path.is_dir():
            raise InputError(str(path), "cannot be written: it is a directory", hint)
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path.resolve()  # a link keeps pointing where it did
        with partial.open("wb") as file:
            yield file
        partial.replace(target)
    except OSError as error:
        raise InputError(str(path), f"cannot be written: {error.strerror or str(error).splitlines()[0]}", hint) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes | str, hint: str = "") -> None:
    """Write a file (text as UTF-8) whole or not at all. Raises InputError, with ``hint``, when the disk refuses."""
    with whole_file(path, hint) as file:
        file.write(data.encode("utf-8") if isinstance(data, str) else data)
