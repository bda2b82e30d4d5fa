"""Recompilation policies: whether a step plan that no longer fits is compiled again."""
