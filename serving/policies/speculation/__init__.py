"""Speculation policies: how many draft tokens to verify beside each decode."""
