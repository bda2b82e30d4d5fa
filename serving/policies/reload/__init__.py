"""Reload policies: read KV pages back from a lower tier, or compute them again."""
