"""Batching windows: when waiting requests may be admitted."""
