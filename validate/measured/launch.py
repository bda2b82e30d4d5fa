"""How the servers of a table were launched and how they were asked: what those who measured them document.

A row states engine, LLM, GPUs, lengths and users. The rest is taken from what is public about the two sources of rows:

* InferenceX (SemiAnalysis): its launch script of Llama 70B on H100 (``benchmarks/70b_fp8_h100_slurm.sh``) has ``kv-cache-dtype: fp8``,
  ``async-scheduling: true``, ``max-num-batched-tokens: 8192``, ``max-num-seqs`` = users, and asks ten times as many requests as users, of 0.8 to
  1 x the nominal lengths.
* AIConfigurator (NVIDIA): its generator launches the servers that it benchmarks (``generator/rule_plugin/benchmark/*.rule``) with
  prompt + 1500 tokens a step, and beside them one for each of the ``max_batch_size`` (default 128) sequences under vLLM and TensorRT-LLM;
  with SGLang's mixed chunks, whose option its template for 0.5.1 misspells (those servers prefill first, SGLang's default); with
  TensorRT-LLM's overlap scheduler; and an FP8 checkpoint with FP8 KV entries. It asks ten times as many requests as users, all of one length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from serving.catalog import Gpu

DEFAULT_SEQS = 128  # of the generator
PROMPT_ROOM = 1500  # tokens a step above one prompt
MIXED_CHUNKS_SINCE = (0, 5, 3)  # SGLang


@dataclass(frozen=True, slots=True)
class Launch:
    """A server's settings and the spread of its client's lengths, uniform in [(1 - ``spread``) x nominal, nominal].

    ``plans_in_flight`` 2: the engine plans the next step while the device works, so its host time is hidden and what a step
    brought is seen a step later.
    """

    batching: str
    block_tokens: int
    max_batch_tokens: int
    max_batch_seqs: int
    plans_in_flight: int
    kv_dtype: str
    spread: float

    def host_step_s(self, gpu: Gpu) -> float:
        """The host's exposed time per step: nothing where it is hidden, else the catalogue's."""
        return 0.0 if self.plans_in_flight > 1 else gpu.host.step_s


DEFAULTS = {
    "vllm": Launch("chunked_prefill", 16, 8192, 1024, 1, "bf16", 0.0),
    "sglang": Launch("prefill_first", 16, 8192, 1024, 2, "bf16", 0.0),
    "trtllm": Launch("whole_prompt", 32, 8192, 2048, 2, "bf16", 0.0),
}


def by_inferencex(engine: str, users: int) -> Launch:
    """The launch of a server in InferenceX."""
    launch = replace(DEFAULTS[engine], spread=0.2)
    return replace(launch, max_batch_seqs=users, plans_in_flight=2, kv_dtype="fp8") if engine == "vllm" else launch


def by_aiconfigurator(engine: str, version: str, *, weight_dtype: str, prompt_tokens: int, users: int) -> Launch:
    """The launch of a server by AIConfigurator's generator."""
    launch = DEFAULTS[engine]
    seqs = max(users, DEFAULT_SEQS)
    tokens = prompt_tokens + PROMPT_ROOM + (0 if engine == "sglang" else seqs)
    mixed = engine == "sglang" and _numbers(version) >= MIXED_CHUNKS_SINCE
    return replace(
        launch, batching="whole_prompt" if mixed else launch.batching, max_batch_tokens=tokens, max_batch_seqs=seqs,
        kv_dtype="fp8" if weight_dtype == "fp8" else "bf16",
    )  # fmt: skip


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 0.5.6.post2 -> (0, 5, 6)."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
