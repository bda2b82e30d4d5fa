"""Ordering policies: who is next."""
