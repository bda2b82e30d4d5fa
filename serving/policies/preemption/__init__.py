"""Preemption policies: who gives way."""
