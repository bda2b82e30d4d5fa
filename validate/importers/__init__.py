"""Files that load generators and engines leave behind, each turned into a run directory."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from serving.errors import InputError, nearest
from validate.importers import aiperf, guidellm, loadgen, step_log, vllm_bench, vllm_requests
from validate.importers.imported import Imported, write
from validate.importers.source import Source

FORMATS: dict[str, ModuleType] = {
    module.NAME: module for module in (vllm_bench, aiperf, guidellm, vllm_requests, loadgen, step_log)
}  # each has NAME, matches(source) and read(source, select)


def detect(path: Path | str) -> str | None:
    """Return the name of the format that the file looks like, or None. Raises InputError when it cannot be read."""
    source = Source(path)
    return next((name for name, module in FORMATS.items() if module.matches(source)), None)


def read_file(format_name: str, path: Path | str, select: int | None = None) -> Imported:
    """Read a file of a named format. Raises InputError, also saying which kind the file looks like when it is another."""
    if format_name not in FORMATS:
        raise InputError("FORMAT", f"there is no import format '{format_name}'", nearest(format_name, FORMATS))
    source = Source(path)
    if not FORMATS[format_name].matches(source):
        raise InputError(str(path), f"is no {format_name} file", _looks_like(source))
    return FORMATS[format_name].read(source, select)


def import_file(format_name: str, path: Path | str, out: Path, select: int | None = None) -> Imported:
    """Read a file and write the run directory ``out``. Raises InputError as ``read_file`` and the writer do."""
    run = read_file(format_name, path, select)
    write(run, out)
    return run


def _looks_like(source: Source) -> str:
    known = next((name for name, module in FORMATS.items() if module.matches(source)), None)
    if known:
        return f"it looks like {known}"
    line, head = source.first_line or {}, source.text[:20000]
    if {"timestamp", "input_length", "output_length"} <= line.keys() or "ContextTokens" in head.split("\n", 1)[0]:
        return "it looks like a request trace: replay it with `twinserve run --trace`"
    if "component_health" in head and "replica_health" in head:
        return "it looks like an llm-d benchmark report, which cannot be imported"
    if not head.strip():
        return "it is empty"
    return "it looks like none of: " + ", ".join(FORMATS)
