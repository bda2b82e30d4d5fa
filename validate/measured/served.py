"""A table of measured servers under closed-loop load: one row a run, with its mean TTFT and TPOT.

Columns as in AIConfigurator's silicon sample: id, silicon_data_source, backend, backend_version, model_path, system, gemm_quant_mode,
isl, osl, batch_size (concurrent users), tp_size, silicon_ttft_ms, silicon_tpot_ms. Operator timings of a GPU, where there are
any, lie beside the table in a folder named as its ``system``.

What the table does not record is taken from what is public about its sources (``launch.py``), or fitted (``Setup``); it decides TTFT.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwmodels import latency
from hwmodels.latency import LatencyModel
from serving import catalog
from serving.catalog import Gpu, load_gpu, load_llm
from serving.errors import InputError, nearest
from serving.llm import Llm
from validate.importers.source import Source, number
from validate.measured.launch import DEFAULTS, Launch, by_aiconfigurator, by_inferencex

COLUMNS = ("id", "silicon_data_source", "backend", "backend_version", "model_path", "system", "gemm_quant_mode", "isl", "osl", "batch_size",
           "tp_size", "silicon_ttft_ms", "silicon_tpot_ms")  # fmt: skip
WAVES = 10  # requests per user, the start-up burst among them, as the load generators' scripts send
SEED = 1
FP8_ATTENTION = ("sglang", "trtllm")  # engines that compute a prompt's attention in FP8 over FP8 KV entries, as the package infers

EXCLUDED = (
    "Qwen3-32B FP8 with 4000 x 1000 tokens under TRT-LLM 1.2.0rc6.post1 (4 rows) and vLLM 0.12.0 (3 rows): their TPOT is 0.47 to 0.89 of what "
    "the deployment that their columns describe takes here, and nothing says why"
)


@dataclass(frozen=True, slots=True)
class Setup:
    """What the table does not record of client and server, where it departs from what is documented (``launch.py``).

    None: as documented; for the host's time per step the catalogue's, or nothing where the engine hides it. ``slots_short``
    sequences fewer than users fit into a batch. ``host_sequence_s`` is host time for each sequence of a step.
    """

    spread: float | None = None
    max_batch_tokens: int | None = None
    slots_short: int = 0
    host_step_s: float | None = None
    host_sequence_s: float = 0.0

    def words(self) -> str:
        """The setup in words."""
        parts = [f"{(self.host_step_s or 0.0) * 1e3:.1f} ms of host time a step and {self.host_sequence_s * 1e6:.0f} us a sequence in it"]
        parts += [f"lengths {1.0 - self.spread:g}-1 x nominal"] if self.spread is not None else []
        parts += [f"{self.max_batch_tokens} tokens a step"] if self.max_batch_tokens is not None else []
        parts += [f"{self.slots_short} slot fewer than users"] if self.slots_short else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Deployment:
    """What decides the price of a step."""

    engine: str
    llm: str
    gpu: str
    tensor_parallel: int
    quantisation: str  # as in the table; empty for bf16
    kv_dtype: str
    profile: Path | None

    @property
    def weight_dtype(self) -> str:
        """Dtype of the weights."""
        return "fp8" if self.quantisation else "bf16"


@dataclass(frozen=True, slots=True)
class Served:
    """One measured server. Times in seconds."""

    where: str
    identity: str
    engine: str
    version: str
    llm: str
    gpu: str
    tensor_parallel: int
    quantisation: str  # as in the table; empty for bf16
    prompt_tokens: int
    output_tokens: int
    users: int
    ttft_s: float
    tpot_s: float
    inferencex: bool  # measured by InferenceX, else by AIConfigurator's authors
    profile: Path | None

    @property
    def weight_dtype(self) -> str:
        """Dtype of the weights."""
        return "fp8" if self.quantisation else "bf16"

    @property
    def group(self) -> str:
        """Rows of one engine, LLM, dtype and GPU: the unit of a fit."""
        return f"{self.llm} {self.weight_dtype} {self.gpu} {self.engine}"

    @property
    def deployment(self) -> Deployment:
        """What decides the price of a step."""
        return Deployment(self.engine, self.llm, self.gpu, self.tensor_parallel, self.quantisation, self.launch.kv_dtype, self.profile)

    @property
    def launch(self) -> Launch:
        """Server and client as those who measured them document it."""
        if self.inferencex:
            return by_inferencex(self.engine, self.users)
        return by_aiconfigurator(self.engine, self.version, weight_dtype=self.weight_dtype, prompt_tokens=self.prompt_tokens, users=self.users)


def find(root: Path) -> list[Path]:
    """Return the served tables under ``root``, in order of their path."""
    return [path for path in sorted(root.rglob("served*.csv")) if "silicon_ttft_ms" in Source(path).header]


def read(path: Path) -> list[Served]:
    """Read a table without the rows of ``EXCLUDED``. Raises InputError naming line and column."""
    source = Source(path)
    for column in COLUMNS:
        if column not in source.header:
            raise InputError(str(path), f"column '{column}' is missing", nearest(column, source.header))
    rows = [_row(f"{path}:{line}", record, path.parent) for line, record in source.csv_rows()]
    if not rows:
        raise InputError(str(path), "the file has a header and no rows")
    return [row for row in rows if not _excluded(row)]


def _excluded(row: Served) -> bool:
    deployment = (row.llm, row.weight_dtype, row.version) in (("qwen3-32b", "fp8", "1.2.0rc6.post1"), ("qwen3-32b", "fp8", "0.12.0"))
    return deployment and (row.prompt_tokens, row.output_tokens) == (4000, 1000)


def _row(where: str, record: dict[str, str], folder: Path) -> Served:
    def count(column: str) -> int:
        return int(number(record, column, where, at_least=1))

    engine = record["backend"]
    if engine not in DEFAULTS:
        raise InputError(where, f"column 'backend': no engine named '{engine}'", nearest(engine, DEFAULTS))
    times = {column: number(record, column, where) * 1e-3 for column in ("silicon_ttft_ms", "silicon_tpot_ms")}
    for column, seconds in times.items():
        if not seconds:
            raise InputError(where, f"column '{column}' is 0", "a measured time must be positive")
    profile = folder / record["system"]
    return Served(
        where, record["id"], engine, record["backend_version"], _llm_named(record["model_path"], where), _gpu_named(record["system"], where), count("tp_size"),
        record["gemm_quant_mode"], count("isl"), count("osl"), count("batch_size"), times["silicon_ttft_ms"], times["silicon_tpot_ms"],
        "model=" in record["silicon_data_source"], profile if profile.is_dir() else None,
    )  # fmt: skip


def _llm_named(model: str, where: str) -> str:
    base = model.split("/")[-1].lower().removesuffix("-instruct")
    if base not in catalog.names("llms"):
        raise InputError(where, f"column 'model_path': the catalogue has no language model '{base}'", nearest(base, catalog.names("llms")))
    return base


def _gpu_named(system: str, where: str) -> str:
    name = system.replace("_", "-")
    if name not in catalog.names("gpus"):
        raise InputError(where, f"column 'system': the catalogue has no GPU '{name}'", nearest(name, catalog.names("gpus")))
    return name


@dataclass(frozen=True, slots=True)
class Priced:
    """The latency model of a deployment, without the host's time per step, and what it is called."""

    model: LatencyModel
    words: str
    llm: Llm
    gpu: Gpu


def price(deployment: Deployment) -> Priced:
    """Return the best informed latency model of a deployment: operators measured beside the table, else the package behind ``silicon``,
    else the roofline."""
    llm, gpu = load_llm(deployment.llm), load_gpu(deployment.gpu)
    facts = {"llm": llm, "gpu": gpu} | {name: getattr(deployment, name) for name in ("tensor_parallel", "weight_dtype", "kv_dtype")}
    silicon = {"engine": deployment.engine} | ({"gemm_quant": deployment.quantisation} if deployment.quantisation else {})
    if deployment.kv_dtype == "fp8" and deployment.engine in FP8_ATTENTION:
        silicon["attention_quant"] = "fp8"
    choices: list[tuple[str, dict[str, Any]]] = [("table", {"profile": str(deployment.profile)})] if deployment.profile else []
    for name, options in (*choices, ("silicon", silicon), ("roofline", {})):
        try:
            model = latency.build(name, {**options, "host_step_s": 0.0}, **facts)
        except InputError:
            if name == "roofline":
                raise
            continue
        return Priced(model, _words(name, model), llm, gpu)
    raise AssertionError("the roofline prices every deployment or refuses it")


def _words(name: str, model: LatencyModel) -> str:
    if name == "roofline":
        return "roofline"
    known = model.provenance()
    if name == "table":
        return f"table (operator sample {Path(known['folder']).name})"
    return f"silicon ({known['package']}, {known['engine']} {known['backend_version']})"
