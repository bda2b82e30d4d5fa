"""The second clock: a real torch/Triton engine driven by the same scheduler."""
