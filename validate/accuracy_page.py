"""Writes the measured part of docs/accuracy.md: ``python -m validate.accuracy_page FOLDER docs/accuracy.md``."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path

from validate.accuracy import accuracy
from validate.accuracy_tables import print_rows
from validate.measured.row import Row

BEGIN, END = "<!-- output of twinserve accuracy: begin -->", "<!-- output of twinserve accuracy: end -->"


def replaced(page: str, rows: Sequence[Row]) -> str:
    """Return ``page`` with the table of ``rows`` between the marks. Raises ValueError when the page has no marks."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page has no lines '{BEGIN}' and '{END}'")
    text = io.StringIO()
    print_rows(rows, None, text)
    lines = "\n".join(line.rstrip() for line in text.getvalue().strip().splitlines())
    return f"{before}{BEGIN}\n```text\n{lines}\n```\n{END}{after}"


def main(folder: str, page: str) -> None:
    """Replay everything in ``folder`` and rewrite ``page``."""
    path = Path(page)
    path.write_text(replaced(path.read_text(), accuracy(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
