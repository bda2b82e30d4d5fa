"""Scenarios: YAML to frozen objects, with errors that name the dotted path, the file and the line."""

from __future__ import annotations

from serving.scenario.fields import PolicySpec, data_file
from serving.scenario.load import from_mapping, load, names
from serving.scenario.model import Cluster, KvCache, Measure, Scenario, Slo, Targets, json_schema
from serving.scenario.policy import Batching, Policy
from serving.scenario.workload import RequestClass, Workload

__all__ = [
    "Batching",
    "Cluster",
    "KvCache",
    "Measure",
    "Policy",
    "PolicySpec",
    "RequestClass",
    "Scenario",
    "Slo",
    "Targets",
    "Workload",
    "data_file",
    "from_mapping",
    "json_schema",
    "load",
    "names",
]
