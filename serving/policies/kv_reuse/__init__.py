"""Policies of cross-layer KV reuse: which layers read the keys and values of an earlier one."""
