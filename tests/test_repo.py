"""The repository as a newcomer finds it: it names no machine, every scenario loads, the README tells the truth."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

import twinserve
from serving import policies, scenario
from serving.request import Request

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("serving", "hwmodels", "sim", "engine", "validate")
FORBIDDEN = {  # what must not be in a file -> where it may be
    "/work/": (),
    "/root/": (),
    "/home/": (),
    "../shared": (".ci/run",),
}
MAX_FUNCTION_LINES, MAX_MODULE_LINES = 60, 400


def tracked() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is no list of the repository's files")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def sources() -> list[Path]:
    return [ROOT / "twinserve.py", *(path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")))]


def text_of(path: Path) -> str:
    data = path.read_bytes()
    return "" if b"\0" in data[:8192] else data.decode("utf-8")


def test_no_file_names_a_machine():
    wrong = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in tracked()
        if path != Path(__file__).resolve()
        for word, allowed in FORBIDDEN.items()
        if word in text_of(path) and str(path.relative_to(ROOT)) not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_left_to_do_and_nothing_is_a_manager():
    wrong = []
    for path in sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        wrong += [f"{path}: class {name}" for name in classes if re.match(r"Base[A-Z]|.*(Manager|Handler)$", name)]
        wrong += [f"{path}: {word}" for word in ("TODO", "FIXME", "XXX") if re.search(rf"\b{word}\b", path.read_text(encoding="utf-8"))]
        wrong += [str(path)] if path.name in ("utils.py", "helpers.py", "common.py") else []
    assert not wrong, "\n".join(wrong)


def test_a_function_fits_a_screen_and_a_module_has_one_job():
    wrong = []
    for path in sources():
        source = path.read_text(encoding="utf-8")
        lines = source.count("\n")
        if lines > MAX_MODULE_LINES:
            wrong.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", scenario.names())
def test_every_scenario_loads(name):
    loaded = scenario.load(name)
    assert loaded.name == name
    assert scenario.from_mapping(loaded.resolved()).resolved() == loaded.resolved()


def code_lines(document: str) -> list[str]:
    """Return the lines of the fenced code blocks of a Markdown file."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / document).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_the_commands_in_the_documents_exist(document):
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    commands = [line.split("#")[0].split() for line in code_lines(document) if re.match(r"(make|twinserve|\.venv/bin/twinserve) ", line)]
    assert commands
    for words in commands:
        if words[0] == "make":
            assert all(word in targets for word in words[1:] if "=" not in word), words
        elif not words[1].startswith("-"):
            assert words[1] in twinserve.COMMANDS, words
            if words[1] == "run" and not words[2].endswith(".yaml"):
                assert words[2] in scenario.names(), words


def test_the_readmes_policy_loads(tmp_path):
    block = re.search(r"^```python\n# (\w+\.py)\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / block[1]).write_text(block[2])
    policy = policies.load("ordering", f"{tmp_path / block[1]}:ShortestPrompt")
    long, short = Request(1, 0.0, 900, 10), Request(2, 5.0, 100, 10)
    assert policy.key(short, None) < policy.key(long, None)


def test_the_readme_shows_the_table_that_a_run_prints(capsys):
    shown = re.search(r"^```text\n\$ make run\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[1]
    assert twinserve.main(["run", "quickstart"]) == 0
    printed = capsys.readouterr().out

    def labels(text: str) -> list[str]:
        return [label for label in re.findall(r"^([A-Z][A-Za-z0-9 -]*?)(?: \(m?s\))?  ", text, re.MULTILINE) if label != "Class"]

    assert labels(shown) == labels(printed) and len(labels(shown)) > 10


def test_the_paths_in_the_documents_exist():
    for document in ("README.md", "CONTRIBUTING.md", "docs/invariants.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", text):
            assert ((ROOT / document).parent / target).exists(), f"{document} links to {target}"
        for path in re.findall(r"`((?:serving|hwmodels|sim|engine|validate|scenarios|tests|docs)/[\w./-]+\.(?:py|yaml|md))(?:::\w+)?`", text):
            assert (ROOT / path).exists(), f"{document} names {path}"


def test_ci_runs_the_readmes_second_command():
    assert "make test" in (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
