"""Every command of the tutorials runs, in the order of its page, with the files that the page has its reader write."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted((DOCS / "tutorials").glob("*.md"))
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def blocks(page: Path) -> list[tuple[str, list[str], str]]:
    """(language, words after it, text) of each fenced block of ``page``."""
    return [(language, words.split(), text) for language, words, text in FENCE.findall(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_runs(page, tmp_path):
    (tmp_path / "scenarios").symlink_to(ROOT / "scenarios")
    command = f'twinserve() {{ {shlex.quote(sys.executable)} {shlex.quote(str(ROOT / "twinserve.py"))} "$@"; }}\n'
    ran = 0
    for language, words, text in blocks(page):
        for word in words:
            if word.startswith("file="):
                (tmp_path / word.removeprefix("file=")).write_text(text, encoding="utf-8")
        if language != "sh" or ("torch" in words and importlib.util.find_spec("torch") is None):
            continue
        wanted = next((int(word.removeprefix("exit=")) for word in words if word.startswith("exit=")), 0)
        done = subprocess.run(["bash", "-ec", command + text], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == wanted, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        ran += 1
    assert ran >= 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_command_is_left_out(page):
    assert [words[:1] for language, words, _ in blocks(page) if language in ("sh", "console")] and all(
        words[:1] == ["run"] for language, words, _ in blocks(page) if language in ("sh", "console", "bash")
    )


def test_links_lead_somewhere():
    wrong = []
    for page in (*PAGES, DOCS / "README.md", DOCS / "trust.md", DOCS / "fleet-dynamics.md"):
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            if not target.startswith("http") and not (page.parent / target).exists():
                wrong.append(f"{page.name}: {target}")
    assert not wrong


def test_the_index_has_every_page():
    listed = set(LINK.findall((DOCS / "README.md").read_text(encoding="utf-8")))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - {"README.md"}
    assert {page for page in pages if not page.startswith("adr/")} <= listed


def test_yaml_on_the_page_of_changing_fleets_is_valid():
    import yaml

    from serving.scenario import from_mapping

    base = {
        "name": "page", "llm": "llama-3.1-8b", "cluster": {"gpu": "h100-sxm", "replicas": 2},
        "workload": {"requests": 10, "arrivals": {"process": "poisson", "rate_rps": 1.0}, "prompt_tokens": 50, "output_tokens": 5},
    }  # fmt: skip
    seen = set()
    for language, _, text in blocks(DOCS / "fleet-dynamics.md"):
        if language == "yaml":
            part = yaml.safe_load(text)
            from_mapping({**base, **part, "workload": {**base["workload"], **part.get("workload", {})}})
            seen |= set(part)
    assert {"cluster", "faults", "policy", "workload", "rollout"} <= seen
