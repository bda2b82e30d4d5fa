"""The file of finished points: append-only, one JSON line each, keyed by everything that decides the result."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from serving.errors import InputError
from serving.files import write_whole
from serving.version import commit, version

FILE = "points.jsonl"
_ROOT = Path(__file__).resolve().parents[2]
_ROOMS = ("serving", "hwmodels", "sim")
_DIGITS = 24  # of a key: 96 bits


class Points:
    """Finished points by key, in a file of ``folder`` or, when that is None, in memory only. A context manager.

    A line is written whole or, when the machine dies, torn; a torn tail is cut off on opening. Raises InputError when the
    folder cannot be used, is in use by another study, or the disk refuses.
    """

    def __init__(self, folder: Path | None, also: Iterable[str] = ()) -> None:
        """``also``: names of other files that may lie in ``folder``; anything else there is foreign, and refused."""
        self.path = None if folder is None else folder / FILE
        self._values: dict[str, Any] = {}
        self._file: IO[bytes] | None = None
        if folder is not None:
            _refuse_foreign(folder, {FILE, *also})
            self._open(folder)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __len__(self) -> int:
        return len(self._values)

    def add(self, key: str, value: Any) -> None:
        """Keep a point. Equal values come back, whether from memory or from the file."""
        line = json.dumps({"key": key, "value": value}, allow_nan=False)
        self._values[key] = json.loads(line)["value"]
        if self._file is None:
            return
        try:
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise InputError(str(self.path), f"can't be written: {error.strerror}", f"{len(self._values) - 1} finished points are kept; run the same again") from error

    def __enter__(self) -> Points:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError:  # told by add already
                self._file = None

    def _open(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(folder / FILE, "a+b", buffering=0)  # noqa: SIM115  (closed by __exit__)
            _lock(self._file, folder)
            self._file.seek(0)
            text = self._file.read()
            whole = text.rfind(b"\n") + 1
            if whole < len(text):
                self._file.truncate(whole)
        except OSError as error:
            raise InputError(str(folder), f"can't be written: {error.strerror}") from error
        for number, line in enumerate(text[:whole].splitlines(), 1):
            try:
                point = json.loads(line)
                self._values[point["key"]] = point["value"]
            except (ValueError, KeyError, TypeError):
                raise InputError(f"{folder / FILE}:{number}", "is no point of a study", "move the file away to begin anew") from None


def _lock(file: IO[bytes], folder: Path) -> None:
    """Keep a second study out: two of them would interleave their lines."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(str(folder), "is in use by another study", "wait for it, or name another --out") from None


def _refuse_foreign(folder: Path, known: set[str]) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(str(folder), "is a file, not a folder", "name another --out")
    foreign = sorted(entry.name for entry in folder.iterdir() if entry.name not in known)
    if foreign:
        raise InputError(str(folder), f"holds '{foreign[0]}', which no study wrote", "name another --out")


def key_of(*parts: Any) -> str:
    """Digest of plain data together with this version's code: equal keys, equal results."""
    text = json.dumps([code_identity(), *parts], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


@lru_cache(maxsize=1)
def code_identity() -> str:
    """Version and commit; with the content of the sources where no clean commit tells it."""
    revision = commit()
    if revision is None or revision.endswith("-dirty"):
        digest = hashlib.sha256()
        for path in sorted(path for room in _ROOMS for path in (_ROOT / room).rglob("*") if path.suffix in (".py", ".yaml", ".csv")):
            digest.update(path.read_bytes())
        revision = f"{revision}+{digest.hexdigest()[:16]}"
    return f"{version()} {revision}"


def files_identity(data: Any) -> list[str]:
    """Digest of every file outside the package that plain data names by its absolute path (traces, policies, catalogue entries)."""
    found: dict[str, str] = {}
    _find_files(data, found)
    return [found[name] for name in sorted(found)]


def _find_files(data: Any, found: dict[str, str]) -> None:
    if isinstance(data, dict | list):
        for part in data.values() if isinstance(data, dict) else data:
            _find_files(part, found)
    elif isinstance(data, str) and os.path.isabs(data):
        for name in (data, data.rpartition(":")[0]):
            if name and name not in found and Path(name).is_file():
                found[name] = _digest(name, Path(name).stat().st_mtime_ns)


@lru_cache(maxsize=256)
def _digest(name: str, mtime_ns: int) -> str:
    return hashlib.sha256(Path(name).read_bytes()).hexdigest()


def replace_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all. Raises InputError when the disk refuses."""
    write_whole(path, data, "the finished points are kept; run the same again")
