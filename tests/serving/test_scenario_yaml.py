"""YAML text: what is read, with which lines, and what is refused."""

from __future__ import annotations

import pytest
import yaml

from serving.errors import InputError
from serving.scenario.yaml_text import MAX_CHARACTERS, parse


def test_values_follow_the_core_schema() -> None:
    text = "a: 1\nb: 1e6\nc: on\nd: 1:30\ne: true\nf: ~\ng:\nh: '1'\ni: 0x1f\nj: -.5\nk: 2026-01-01\nl: [1, {m: null}]\nn: 007\n"
    assert parse(text, "t").value == {
        "a": 1, "b": 1e6, "c": "on", "d": "1:30", "e": True, "f": None, "g": None, "h": "1", "i": "0x1f", "j": -0.5, "k": "2026-01-01",
        "l": [1, {"m": None}], "n": 7,
    }  # fmt: skip


def test_every_path_knows_its_line() -> None:
    lines = parse("a:\n  b: 1\n  c:\n    - x\n    - {d: 2}\n", "t").lines
    assert lines["a", "b"] == 2
    assert lines["a", "c", 0] == 4
    assert lines["a", "c", 1, "d"] == 5


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "twice"),
        ("a: {b: 1, b: 2}\n", 1, "twice"),
        ("a: 1\n---\nb: 2\n", 2, "second"),
        ("a: &x [1]\nb: *x\n", 1, "anchors"),
        ("a: !!python/object:os.system x\n", 1, "tag"),
        ("a: !!set {x}\n", 1, "tag"),
        ("a: .nan\n", 1, "finite"),
        ("a: -.inf\n", 1, "finite"),
        ("a: 1e400\n", 1, "large"),
        ("1: a\n", 1, "string"),
        ("true: a\n", 1, "string"),
        ("[a]: b\n", 1, "key"),
        ("{a: b}: c\n", 1, "key"),
        ("a: [1\nb: 2\n", 2, "YAML"),
        ("a: b: c\n", 1, "YAML"),
        ("\ta: 1\n", 1, "YAML"),
        ("a: " + "[" * 40 + "]" * 40, 1, "deeper"),
        ("a: " + "[" * 5000, 1, "deeper|nesting"),
    ],
)
def test_what_is_refused_names_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        parse(text, "file.yaml")
    assert caught.value.where == f"file.yaml:{line}"


@pytest.mark.parametrize("text", ["\x00", "a: \x07", "x" * (MAX_CHARACTERS + 1), "@", "%", "a: '", "? "])
def test_hostile_text_is_one_error_or_a_value(text: str) -> None:
    try:
        parse(text, "t")
    except InputError as error:
        assert error.where.startswith("t")


def test_an_alias_bomb_is_refused_at_its_first_anchor() -> None:
    bomb = "a: &a [x, x]\n" + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20))
    with pytest.raises(InputError, match="anchors"):
        parse(bomb, "t")


def test_a_number_of_thousands_of_digits_is_refused_at_once() -> None:
    with pytest.raises(InputError, match="too large"):
        parse("a: " + "9" * 5000, "t")


def test_the_parser_written_in_python_gives_the_same(monkeypatch) -> None:
    """Installations without libyaml use it; its events differ in small ways."""
    text = "# c\na: [1, 'x', {b: ~}]\nc:\n  - true\n  - 1.5\nd: |\n  text\n"
    fast = parse(text, "t")
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    slow = parse(text, "t")
    assert slow.value == fast.value == {"a": [1, "x", {"b": None}], "c": [True, 1.5], "d": "text\n"}
    assert slow.lines == fast.lines
    with pytest.raises(InputError, match="t:1"):
        parse("a: [1", "t")
