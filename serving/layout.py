"""How one replica's weights, KV cache and work lie on its GPUs: tensor, pipeline, sequence, data and expert parallelism.

A stage holds some of the layers. In a stage, a tensor-parallel group splits every matrix; ``ring`` groups hold copies of the
weights and a share of every sequence; ``data`` groups hold copies of the attention weights and sequences of their own, while
the routed experts are spread over all GPUs of the stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from serving.errors import InputError
from serving.llm import WEIGHT_BYTES, Llm


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of parallelism of one replica. The plain default is one GPU.

    ``kv_shards`` GPUs of a tensor-parallel group share the tokens of a KV head instead of splitting heads further;
    ``expert_parallel`` of 1 slices every expert over the tensor-parallel group, more places whole experts.
    """

    tensor_parallel: int = 1
    stages: int = 1
    ring: int = 1
    kv_shards: int = 1
    expert_parallel: int = 1

    @property
    def data(self) -> int:
        """Groups that attend to sequences of their own."""
        return max(1, self.expert_parallel // self.tensor_parallel)

    @property
    def stage_gpus(self) -> int:
        """GPUs that work on the same layers."""
        return self.tensor_parallel * self.ring * self.data

    @property
    def gpus(self) -> int:
        """GPUs of the replica."""
        return self.stage_gpus * self.stages

    @property
    def head_ranks(self) -> int:
        """GPUs over which the KV heads of one sequence are split."""
        return self.tensor_parallel // self.kv_shards

    @property
    def token_shards(self) -> int:
        """Ways in which the KV entries of all sequences are dealt out, each GPU of a stage holding one part of them."""
        return self.kv_shards * self.ring * self.data

    def check(self, llm: Llm) -> None:
        """Raise InputError, by the dotted path of the key at fault, when ``llm`` cannot be laid out like this."""
        llm.check_tensor_parallel(self.head_ranks, "cluster.tensor_parallel")
        if llm.heads % self.tensor_parallel:
            raise InputError("cluster.tensor_parallel", f"{self.tensor_parallel} does not divide the {llm.heads} heads of {llm.name}")
        if self.stages > llm.layers:
            raise InputError("cluster.pipeline_parallel", f"{self.stages} stages cannot share {llm.layers} layers", f"{llm.layers} at most")
        if self.stages > 1 and llm.kv_layers is not None:
            raise InputError("cluster.pipeline_parallel", f"layers of {llm.name} read the KV entries of others: they stay on one stage", "use tensor_parallel")
        experts = self.expert_parallel
        if experts == 1:
            return
        where = "cluster.expert_parallel"
        if llm.moe is None:
            raise InputError(where, f"{llm.name} has no experts to place", "use tensor_parallel")
        if llm.moe.experts % experts:
            raise InputError(where, f"{llm.moe.experts} experts of {llm.name} do not divide into {experts} ranks", "use a divisor")
        if experts % self.tensor_parallel:
            raise InputError(where, f"{experts} is no multiple of tensor_parallel {self.tensor_parallel}", "attention groups must fill it")
        if self.ring > 1:
            raise InputError(where, "cannot be combined with sequence_parallel", "set one of them to 1")

    # -- stages -------------------------------------------------------------------------------------------------------

    def stage_llms(self, llm: Llm) -> list[Llm]:
        """The layers of each stage as a language model of their own, as even as they go, larger stages first.

        Embedding and LM head are still counted in each: who uses them is the caller's to say.
        """
        if self.stages == 1:
            return [llm]
        counts = [llm.layers // self.stages + (i < llm.layers % self.stages) for i in range(self.stages)]
        parts, first = [], 0
        for count in counts:
            moe, window = llm.moe, llm.sliding_window
            if moe is not None:
                moe = replace(moe, dense_layers=min(count, max(0, moe.dense_layers - first)))
            if window is not None:  # windowed layers alternate with full ones, so a stage has its share of them
                share = window.layers * (first + count) // llm.layers - window.layers * first // llm.layers
                window = replace(window, layers=share) if share else None
            parts.append(replace(llm, layers=count, moe=moe, sliding_window=window))
            first += count
        return parts

    # -- bytes on the fullest GPU -------------------------------------------------------------------------------------

    def weight_bytes(self, llm: Llm, dtype: str | None = None) -> int:
        """Bytes of weights on the fullest GPU; embedding and LM head lie on the first and the last stage."""
        vocabulary = llm.vocab * llm.hidden
        one = 2 * (vocabulary // self.tensor_parallel)
        both = 2 * ((vocabulary * (1 if llm.tied_embeddings else 2)) // self.tensor_parallel)
        parts = []
        for i, part in enumerate(self.stage_llms(llm)):
            layers = part.weight_bytes(dtype, self.tensor_parallel) - both
            layers -= self._expert_bytes(part, dtype, self.tensor_parallel) - self._expert_bytes(part, dtype, self.expert_ranks)
            ends = both if self.stages == 1 else one * ((i == 0) + (i == self.stages - 1))
            parts.append(layers + ends)
        return max(parts)

    @property
    def expert_ranks(self) -> int:
        """GPUs over which the routed experts are spread, whole or in slices."""
        return max(self.expert_parallel, self.tensor_parallel)

    @staticmethod
    def _expert_bytes(llm: Llm, dtype: str | None, ranks: int) -> int:
        if llm.moe is None:
            return 0
        return int(WEIGHT_BYTES[llm.dtype_of_experts(dtype)] * llm.parameters().experts / ranks)

    def kv_bytes_per_token(self, llm: Llm, kv_dtype: str = "bf16") -> int:
        """KV bytes that a token costs on the fullest GPU of the replica, on average over the tokens dealt out."""
        fullest = self.stage_llms(llm)[0]
        return -(-fullest.kv_bytes_per_token(kv_dtype, self.head_ranks) // self.token_shards)
