"""Batching policies: what one step holds."""
