"""Autoscaling policies: how many replicas there should be."""
