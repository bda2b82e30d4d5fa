"""Sharding policies: how the GPUs of one group share the weights and the KV cache."""
