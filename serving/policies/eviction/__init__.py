"""Eviction policies: which page leaves a KV tier below the GPU that is full."""
