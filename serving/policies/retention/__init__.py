"""Retention policies: which KV pages of a running sequence are kept."""
