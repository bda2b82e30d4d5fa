"""What a vLLM wheel requires besides torch and its family, a line each: ``python requirements.py WHEEL | pip install -r /dev/stdin``.

The CPU build names a torch that no package index of the ordinary kind has; it is installed first, by its plain version.
"""

from __future__ import annotations

import re
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

TORCH_FAMILY = ("torch", "torchvision", "torchaudio", "torchcodec")


def requirements(wheel: Path) -> list[str]:
    """The wheel's requirements without extras and without torch's family. Needs nothing but Python."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        fields = HeaderParser().parsestr(archive.read(metadata).decode("utf-8"))
    wanted = []
    for line in fields.get_all("Requires-Dist") or []:
        name = re.match(r"[A-Za-z0-9._-]+", line)[0].lower()
        if name not in TORCH_FAMILY and not re.search(r"\bextra\s*==", line):
            wanted.append(line)
    return wanted


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1]))))
