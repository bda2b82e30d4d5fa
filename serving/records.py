"""The run directory: what a run, simulated or real, leaves behind, and what every later stage reads.

``run.yaml`` (resolved scenario, seed, commit, device, versions), ``requests.parquet``, ``steps.parquet``, ``plans.parquet``, ``stages.parquet``
(where requests pass stages or sites), ``engine_steps.parquet`` (a real engine's only) and ``summary.json``. The directory appears whole: it is filled under a temporary name beside its own and renamed at the end.
Nothing in it depends on the wall clock, so equal input gives equal bytes (parquet also names the pyarrow that wrote it).
"""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from serving.errors import InputError
from serving.files import parse_json, read_text
from serving.metrics import STATUS_NAMES
from serving.run_checks import check_rows, check_summary
from serving.version import commit, version

if TYPE_CHECKING:
    import pandas as pd

RUN_FILES = ("run.yaml", "requests.parquet", "steps.parquet", "plans.parquet", "stages.parquet", "engine_steps.parquet", "summary.json")
FLUSH_ROWS = 65536
_INFO_KEYS = ("twinserve", "scenario", "seed", "commit", "device", "partial", "versions")

# Column -> type. ``graph``: captured batch size that the step was padded to, 0 when it ran eagerly. ``steps``: a row may stand for a
# run of so many decode-only steps; ``duration_s`` is then the whole run's and ``decode_context_tokens`` the first step's. ``accepted``: where
# decodes verified drafts, the tokens that each got, in the order of admission; runs recorded before there were any lack the column.
REQUEST_COLUMNS = {
    "request_id": "int64", "class": "text", "arrival_s": "float64", "prompt_tokens": "int32", "cached_tokens": "int32", "output_tokens": "int32",
    "scheduled_s": "float64", "first_token_s": "float64", "finish_s": "float64", "preemptions": "int32", "replica": "int32", "status": "text",
}  # fmt: skip
STEP_COLUMNS = {
    "step": "int64", "replica": "int32", "start_s": "float64", "duration_s": "float64", "prefill_tokens": "int32", "prefill_seqs": "int32",
    "decode_seqs": "int32", "decode_context_tokens": "int64", "kv_blocks_used": "int32", "graph": "int32", "preempted": "int32", "steps": "int32",
}  # fmt: skip
PLAN_COLUMNS = {
    "step": "int64", "schedule_s": "float64", "commit_s": "float64", "submitted": "ids", "aborted": "ids", "chunks": "chunks",
    "preempted": "ids", "swapped": "ids", "finished": "ids", "replica": "int32", "accepted": "ids",
}  # fmt: skip
# What a request passed before a replica saw it, where a scenario has stages or sites: from ``entered_s`` it waited, from ``started_s`` it was
# served; ``network`` is the way to the site that served it. ``outcome``: which cache answered, if one did.
STAGE_COLUMNS = {
    "request_id": "int64", "stage": "text", "site": "text", "entered_s": "float64", "started_s": "float64", "ended_s": "float64", "outcome": "text",
}  # fmt: skip
# What a real engine knows of each step besides: one row per row of steps.parquet. Host seconds split as in ``engine.step.StepTimes``
# (``schedule_s``: from the tokens of the step before to this step's plan), device seconds, all as measured; ``measured_s`` is the whole
# step on the machine's own clock, ``reference_s`` the reference step that normalised it (0: not normalised), ``events_before_commits``, for
# each commit since the plan before, how many of the submissions (refused ones included) and aborts that this plan saw came before it.
ENGINE_STEP_COLUMNS = {
    "step": "int64", "path": "text", "rows": "int32", "query_key_pairs": "int64", "prefill_context_tokens": "int64", "logits_rows": "int32",
    "schedule_s": "float64", "prepare_s": "float64", "launch_s": "float64", "sample_s": "float64", "post_s": "float64", "device_s": "float64",
    "measured_s": "float64", "reference_s": "float64", "events_before_commits": "ids",
}  # fmt: skip


def summary_json(summary: Mapping[str, Any]) -> str:
    """Return the exact text of ``summary.json``, which ``run --json`` prints too."""
    return json.dumps(summary, indent=2, allow_nan=False) + "\n"


class TableLog:
    """Rows for one parquet file: ``append`` a tuple in column order, call ``flush_if_full`` now and then.

    Every ``FLUSH_ROWS`` rows become a row group on disk, so memory stays bounded however long the run is.
    """

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        self._path = path
        self._schema = _schema(columns)
        self._rows: list[tuple] = []
        self._writer = _parquet_writer(path, self._schema)
        self.append = self._rows.append  # the hot path

    def flush_if_full(self) -> None:
        """Write a row group when enough rows are waiting. Raises InputError when the disk refuses."""
        if len(self._rows) >= FLUSH_ROWS:
            self._flush()

    def close(self) -> None:
        """Write what is left and finish the file. Raises InputError when the disk refuses."""
        self._flush()
        with _disk_errors(self._path):
            self._writer.close()

    def abandon(self) -> None:
        """Let go of the file without caring what is in it."""
        with contextlib.suppress(OSError):
            self._writer.close()

    def _flush(self) -> None:
        if not self._rows:
            return
        import pyarrow as pa

        columns = zip(*self._rows)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema)]
        self._rows.clear()  # the list itself must live on: ``append`` is bound to it
        with _disk_errors(self._path):
            self._writer.write_batch(pa.record_batch(arrays, schema=self._schema))


class RunWriter:
    """Fills a run directory and publishes it at the end; left without ``publish`` (an error), it leaves nothing.

    Use it as a context manager. ``steps``, ``plans``, ``stages`` and ``engine_steps`` are ``TableLog``s, or None when not asked for.
    """

    def __init__(self, out: Path | str, *, steps: bool = True, plans: bool = False, stages: bool = False, engine_steps: bool = False) -> None:
        """Reserve ``out``. Raises InputError when it can't be written or holds anything that isn't a run."""
        self.out = Path(out)
        refuse_unless_replaceable(self.out)
        with _disk_errors(self.out):
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix=f".{self.out.name}.", dir=self.out.parent))
            self._folder.chmod(0o755)
        self.steps = TableLog(self._folder / "steps.parquet", STEP_COLUMNS) if steps else None
        self.plans = TableLog(self._folder / "plans.parquet", PLAN_COLUMNS) if plans else None
        self.engine_steps = TableLog(self._folder / "engine_steps.parquet", ENGINE_STEP_COLUMNS) if engine_steps else None
        self.stages = TableLog(self._folder / "stages.parquet", STAGE_COLUMNS) if stages else None
        self._logs = [log for log in (self.steps, self.plans, self.engine_steps, self.stages) if log is not None]
        self._open = True

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            self._open = False
            for log in self._logs:
                log.abandon()
            shutil.rmtree(self._folder, ignore_errors=True)

    def publish(
        self,
        *,
        scenario: Mapping[str, Any],
        seed: int,
        device: str,
        summary: Mapping[str, Any],
        requests: Mapping[str, np.ndarray] | None = None,
        class_names: Sequence[str] = (),
        partial: bool = False,
        versions: Mapping[str, str] | None = None,
        measured_on: str | None = None,
        latency: Mapping[str, Any] | None = None,
    ) -> None:
        """Finish every file and put the directory in its place.

        ``scenario`` is the resolved one as plain data; ``requests`` is ``Metrics.columns()``; ``device`` says what ran (``simulated
        h100-sxm``, or a real GPU's name); ``versions`` adds libraries to those always noted; ``partial`` marks an interrupted run;
        ``measured_on`` is the date of a measurement: a simulation has none, it is the same whenever it is made. ``latency`` says where
        the prices of steps come from.
        Raises InputError when the disk refuses a file: the files finished until then are published without it.
        """
        info = {
            "twinserve": version(),
            "seed": seed,
            "commit": commit(),
            "device": device,
            **({"measured_on": measured_on} if measured_on else {}),
            **({"latency": dict(latency)} if latency else {}),
            "partial": partial,
            "versions": {"python": platform.python_version(), "numpy": np.__version__, **(versions or {})},
            "scenario": dict(scenario),
        }
        try:
            _write_text(self._folder / "run.yaml", _yaml(info))
            _write_text(self._folder / "summary.json", summary_json(summary))
            for log in self._logs:
                log.close()
            if requests is not None:
                _write_requests(self._folder / "requests.parquet", requests, class_names)
        except InputError as error:
            (self._folder / Path(error.where).name).unlink(missing_ok=True)
            self._publish_folder()
            raise InputError(str(self.out / Path(error.where).name), error.problem, "the files finished before it are kept") from error
        self._publish_folder()

    def _publish_folder(self) -> None:
        """Swap the filled directory in; an older run there is removed only once it is out of the way."""
        self._open = False
        with _disk_errors(self.out):
            refuse_unless_replaceable(self.out)
            if self.out.exists():
                older = Path(tempfile.mkdtemp(prefix=f".{self.out.name}.", dir=self.out.parent))
                self.out.rename(older / "run")
                self._folder.rename(self.out)
                shutil.rmtree(older)
            else:
                self._folder.rename(self.out)


def refuse_unless_replaceable(out: Path) -> None:
    """Raise InputError when ``out`` exists and holds anything but the files of a run."""
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(str(out), "is a file, not a run directory", "name another --out")
    foreign = sorted(entry.name for entry in out.iterdir() if entry.name not in RUN_FILES)
    if foreign:
        raise InputError(str(out), f"holds '{foreign[0]}', which no run wrote: it will not be overwritten", "name another --out")


class Run:
    """A run read from its directory. Tables are pandas frames, loaded when first asked for."""

    def __init__(self, path: Path, info: Mapping[str, Any]) -> None:
        self.path = path
        self.info = info

    @property
    def partial(self) -> bool:
        """Whether the run was interrupted: its tables end early."""
        return bool(self.info["partial"])

    def has(self, table: str) -> bool:
        """Return whether ``table`` (``requests``, ``steps``, ``plans``, ``stages`` or ``engine_steps``) was recorded."""
        return (self.path / f"{table}.parquet").is_file()

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The contents of ``summary.json``; InputError when it is missing or broken."""
        path = self.path / "summary.json"
        summary = parse_json(read_text(path), str(path))
        if not isinstance(summary, dict):
            raise InputError(str(path), "holds no object of metrics")
        check_summary(summary, path)
        return summary

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row per request, by id; InputError when missing or broken (so too below)."""
        return _read_table(self.path / "requests.parquet", REQUEST_COLUMNS, "the run was made with --no-records")

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row per step, or per run of decode-only steps."""
        return _read_table(self.path / "steps.parquet", STEP_COLUMNS, "the run was made with --no-records")

    @cached_property
    def plans(self) -> pd.DataFrame:
        """One row per plan, with the decisions it held."""
        needed = {name: kind for name, kind in PLAN_COLUMNS.items() if name != "accepted"}
        return _read_table(self.path / "plans.parquet", needed, "plans are recorded on request only")

    @cached_property
    def stages(self) -> pd.DataFrame:
        """One row per request and stage before the model, in order of entry."""
        return _read_table(self.path / "stages.parquet", STAGE_COLUMNS, "the scenario has neither stages nor sites")

    @cached_property
    def engine_steps(self) -> pd.DataFrame:
        """One row per step of a real engine, in the order of ``steps``: where its time went."""
        return _read_table(self.path / "engine_steps.parquet", ENGINE_STEP_COLUMNS, "only the engine writes it")


def open_run(path: Path | str) -> Run:
    """Open a run directory. Raises InputError naming the file and what is missing or broken in it."""
    import yaml

    folder = Path(path)
    if not folder.is_dir():
        raise InputError(str(folder), "is not a directory" if folder.exists() else "does not exist", "a run directory is what --out makes")
    file = folder / "run.yaml"
    if not file.is_file():
        raise InputError(str(folder), "is not a run directory: it has no run.yaml")
    text = read_text(file)
    try:
        info = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        raise InputError(f"{file}:{mark.line + 1}" if mark else str(file), "is not YAML") from error
    missing = [key for key in _INFO_KEYS if not isinstance(info, dict) or key not in info]
    if missing:
        raise InputError(str(file), f"lacks the key '{missing[0]}'")
    if not isinstance(info["scenario"], dict) or not isinstance(info["versions"], dict):
        raise InputError(str(file), f"'{'versions' if isinstance(info['scenario'], dict) else 'scenario'}' must be a mapping")
    return Run(folder, info)


def _read_table(path: Path, columns: Mapping[str, str], why_absent: str) -> pd.DataFrame:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise InputError(str(path), "does not exist", why_absent)
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(str(path), f"is not a readable parquet file: {str(error).splitlines()[0]}") from error
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise InputError(str(path), f"lacks the column '{missing[0]}'")
    for field in _schema(columns):
        found = table.schema.field(field.name).type
        if found != field.type and not (_is_number(found) and _is_number(field.type)):
            raise InputError(str(path), f"the column '{field.name}' holds {found}, not {field.type}")
    if columns in (REQUEST_COLUMNS, STEP_COLUMNS):
        check_rows(table, columns, path)
    return table.to_pandas()


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _write_requests(path: Path, columns: Mapping[str, np.ndarray], class_names: Sequence[str]) -> None:
    """Write the rows of ``Metrics.columns()``, class and status by name."""
    import pyarrow as pa

    schema = _schema(REQUEST_COLUMNS)
    named = {"class": (columns["class_index"], class_names), "status": (columns["status_code"], STATUS_NAMES)}
    arrays = []
    for field in schema:
        if field.name in named:
            codes, names = named[field.name]
            arrays.append(pa.DictionaryArray.from_arrays(codes.astype(np.int32), pa.array(list(names), pa.string())).cast(pa.string()))
        else:
            arrays.append(pa.array(columns[field.name]).cast(field.type))
    writer = _parquet_writer(path, schema)
    with _disk_errors(path), writer:
        writer.write_table(pa.Table.from_arrays(arrays, schema=schema), row_group_size=FLUSH_ROWS)


def _schema(columns: Mapping[str, str]) -> Any:
    import pyarrow as pa

    ids = pa.list_(pa.int64())
    chunk = pa.struct([("request_id", pa.int64()), ("new_tokens", pa.int32())])
    types = {"int64": pa.int64(), "int32": pa.int32(), "float64": pa.float64(), "text": pa.string(), "ids": ids, "chunks": pa.list_(chunk)}
    return pa.schema([(name, types[kind]) for name, kind in columns.items()])


def _parquet_writer(path: Path, schema: Any) -> Any:
    import pyarrow.parquet as pq

    with _disk_errors(path):
        return pq.ParquetWriter(path, schema, compression="zstd")


def _write_text(path: Path, text: str) -> None:
    with _disk_errors(path):
        path.write_text(text, encoding="utf-8", newline="\n")


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turn what the disk says (full, read-only, not permitted) into an InputError that names ``path``."""
    try:
        yield
    except OSError as error:
        raise InputError(str(path), f"can't be written: {error.strerror or str(error).splitlines()[0]}") from error


def _yaml(data: Any) -> str:
    import yaml

    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
