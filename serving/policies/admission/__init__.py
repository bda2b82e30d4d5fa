"""Admission policies: who may queue at all."""
