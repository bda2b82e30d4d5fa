"""Adapter policies: which idle adapter leaves its slot when another is needed."""
