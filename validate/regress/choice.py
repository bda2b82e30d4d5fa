"""What the command line says of a policy: ``KIND=POLICY``, where POLICY may be a name, options, or a file at a git revision."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving import policies
from serving.errors import InputError, nearest


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy of one kind. ``shown`` is how the user wrote it; ``name`` is what a scenario can load."""

    kind: str
    name: str
    shown: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind} policy {self.shown}"


def parse(text: str, where: str, checkout: Path) -> Choice:
    """Read ``KIND=POLICY``; a file at a git revision is written to the folder ``checkout``. Raises InputError."""
    kind, equals, policy = text.partition("=")
    if not equals or not policy:
        raise InputError(where, f"'{text}' is not KIND=POLICY", "for example ordering=fcfs or ordering=mine.py:Slack")
    if kind not in policies.kinds():
        raise InputError(where, f"there is no kind of policy '{kind}'", nearest(kind, policies.kinds()))
    options: dict[str, Any] = {}
    name = policy
    if policy.lstrip().startswith("{"):
        name, options = _from_json(policy, where)
    if ":" in name:
        return Choice(kind, _locate(name, where, checkout), policy, options)
    if name not in policies.names(kind):
        raise InputError(where, f"there is no {kind} policy '{name}'", nearest(name, policies.names(kind)))
    return Choice(kind, name, policy, options)


def _from_json(text: str, where: str) -> tuple[str, dict[str, Any]]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(where, f"is no JSON: {error}") from None
    name = value.pop("name", None) if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise InputError(where, "needs the key 'name'", '{"name": "priority", "preempt": "strict"}')
    return name, value


def _locate(name: str, where: str, checkout: Path) -> str:
    """Return ``name`` with an absolute path where it is a file's, taken out of git if a revision is asked for."""
    file, _, attribute = name.rpartition(":")
    attribute, at, revision = attribute.partition("@")
    if not file.endswith(".py"):
        if at:
            raise InputError(where, f"'{name}': only a file can be taken from a git revision", "path/file.py:Class@REVISION")
        return name
    path = Path(file).expanduser().absolute()
    if not at:
        if not path.is_file():
            raise InputError(where, f"there is no policy file '{file}'")
        return f"{path}:{attribute}"
    old = checkout / f"{path.stem}_at_{re.sub(r'[^A-Za-z0-9]', '_', revision)}.py"
    old.write_bytes(_git_show(path, revision, where))
    return f"{old}:{attribute}"


def _git_show(path: Path, revision: str, where: str) -> bytes:
    if not path.parent.is_dir():
        raise InputError(where, f"there is no folder '{path.parent}'")
    if not revision or revision.startswith("-") or ":" in revision:
        raise InputError(where, f"'{revision}' is no git revision")
    try:
        shown = subprocess.run(["git", "show", f"{revision}:./{path.name}"], cwd=path.parent, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(where, f"git cannot be run: {error}") from None
    if shown.returncode:
        reason = shown.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise InputError(where, f"git has no {path.name} at '{revision}': {reason[0]}")
    return shown.stdout


def same_kinds(baseline: list[Choice], candidate: list[Choice]) -> None:
    """Refuse sides that decide different things: their difference would be the scenarios' own policies'. Raises InputError."""
    for where, side in (("--baseline", baseline), ("--candidate", candidate)):
        kinds = [choice.kind for choice in side]
        twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
        if twice:
            raise InputError(where, f"names two {twice} policies")
    ours, theirs = ({choice.kind for choice in side} for side in (baseline, candidate))
    if ours != theirs:
        other = sorted(ours ^ theirs)[0]
        missing = "--candidate" if other in ours else "--baseline"
        raise InputError(missing, f"says nothing of {other}, which the other side decides", f"add {missing} {other}=...")


_SECTIONS = {"autoscaling": ("cluster", "autoscaling"), "speculation": ("speculation",), "adapters": ("adapters",), "retention": ("retention",)}  # kinds whose policy stands in a part of its own


def concerns(raw: dict[str, Any], kind: str) -> bool:
    """Whether the plain scenario ``raw`` has a policy of ``kind`` to replace."""
    part: Any = raw
    for key in _SECTIONS.get(kind, ()):
        part = part.get(key) if isinstance(part, dict) else None
    return bool(part)


def _with_section(raw: dict[str, Any], path: tuple[str, ...], spec: dict[str, Any]) -> dict[str, Any]:
    """``raw`` with ``spec`` as the policy of the part at ``path``."""
    if not path:
        return {**raw, "policy": spec}
    return {**raw, path[0]: _with_section(raw[path[0]], path[1:], spec)}


def apply(raw: dict[str, Any], choices: list[Choice]) -> dict[str, Any]:
    """Return the plain scenario ``raw`` with its policies of these kinds replaced, where it has any; its step budgets stay."""
    policy = dict(raw.get("policy", {}))
    for choice in choices:
        spec = {"name": choice.name, **choice.options}
        if choice.kind == "batching":
            policy["batching"] = {**_budgets(policy.get("batching", {}), choice), **spec}
        elif choice.kind == "window":
            batching = policy.get("batching", {})
            policy["batching"] = {**({"name": batching} if isinstance(batching, str) else batching), "window": spec}
        elif choice.kind in _SECTIONS:
            if concerns(raw, choice.kind):
                raw = _with_section(raw, _SECTIONS[choice.kind], spec)
        else:
            policy[choice.kind] = spec
    return {**raw, "policy": policy}


def _budgets(batching: Any, choice: Choice) -> dict[str, Any]:
    from serving.scenario import Batching

    known = policies.option_names("batching", choice.name, where="policy.batching")
    mapping = {} if isinstance(batching, str) else batching
    optional = {key for key in ("head_of_line", "max_bypasses") if key not in known}
    return {key: value for key, value in mapping.items() if key in Batching.model_fields and key != "name" and key not in optional}
