"""A table of measured servers under closed-loop load: one row a run, with its mean TTFT and TPOT.

Columns as in AIConfigurator's silicon sample: id, silicon_data_source, backend, backend_version, model_path, system, gemm_quant_mode,
isl, osl, batch_size (concurrent users), tp_size, silicon_ttft_ms, silicon_tpot_ms. Operator timings of a GPU, where there are
any, lie beside the table in a folder named as its ``system``.

What the table does not record is taken from the defaults of client and engine, see ``ENGINES`` and ``Setup``; they decide TTFT.
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

COLUMNS = ("id", "silicon_data_source", "backend", "backend_version", "model_path", "system", "gemm_quant_mode", "isl", "osl", "batch_size",
           "tp_size", "silicon_ttft_ms", "silicon_tpot_ms")  # fmt: skip
WAVES = 10  # requests per user, the start-up burst among them, as the load generators' scripts send
SEED = 1

EXCLUDED = (
    "Qwen3-32B FP8 with 4000 x 1000 tokens under TRT-LLM 1.2.0rc6.post1 (4 rows) and vLLM 0.12.0 (3 rows): their TPOT is about half of "
    "what any latency model gives for the deployment that their columns describe, and nothing says why"
)


@dataclass(frozen=True, slots=True)
class Engine:
    """Defaults of an engine that the table does not record. ``hidden_host``: it plans the next step while the device works."""

    batching: str
    block_tokens: int
    max_batch_tokens: int
    max_batch_seqs: int
    hidden_host: bool


ENGINES = {
    "vllm": Engine("chunked_prefill", 16, 8192, 1024, hidden_host=False),
    "sglang": Engine("prefill_first", 16, 8192, 1024, hidden_host=True),
    "trtllm": Engine("whole_prompt", 32, 8192, 2048, hidden_host=True),
}


@dataclass(frozen=True, slots=True)
class Setup:
    """What the table does not record of client and server.

    Lengths are uniform in [(1 - ``spread``) x nominal, nominal]; a user's next request follows an answer after an exponential time
    of mean ``jitter_s``. None: the engine's own token budget; the catalogue's host time, nothing where the engine hides it.
    """

    spread: float
    jitter_s: float = 0.0
    max_batch_tokens: int | None = None
    host_step_s: float | None = None

    def words(self) -> str:
        """The setup in words."""
        parts = [f"{(self.host_step_s or 0.0) * 1e3:.1f} ms of host time a step", f"lengths {1.0 - self.spread:g}-1 x nominal"]
        parts += [f"requests {self.jitter_s * 1e3:g} ms after answers"] if self.jitter_s else []
        return ", ".join([*parts, f"{self.max_batch_tokens} tokens a step"])


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
    varied_lengths: bool  # InferenceX draws lengths between 0.8 and 1 of the nominal ones; AIPerf sends equal ones
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
    def deployment(self) -> tuple[str, ...]:
        """What decides the price of a step."""
        return (self.engine, self.llm, self.gpu, str(self.tensor_parallel), self.quantisation)

    @property
    def documented(self) -> Setup:
        """Client and engine as their documentation has them."""
        return Setup(0.2 if self.varied_lengths else 0.0)


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
    if engine not in ENGINES:
        raise InputError(where, f"column 'backend': no engine named '{engine}'", nearest(engine, ENGINES))
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


def price(row: Served) -> Priced:
    """Return the best informed latency model of the row's deployment: operators measured beside the table, else the package behind
    ``silicon``, else the roofline."""
    llm, gpu = load_llm(row.llm), load_gpu(row.gpu)
    facts = {"llm": llm, "gpu": gpu, "tensor_parallel": row.tensor_parallel, "weight_dtype": row.weight_dtype}
    silicon = {"engine": row.engine} | ({"gemm_quant": row.quantisation} if row.quantisation else {})
    choices: list[tuple[str, dict[str, Any]]] = [("table", {"profile": str(row.profile)})] if row.profile else []
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
