"""The plotly.js bundle that ships inside the plotly package, packed so that a report stays small and works offline.

The bundle (4.8 MB) is embedded gzipped and in base64 (2 MB); the page unpacks it with DecompressionStream, which browsers have
had since 2020 to 2023 and which works on file:// pages.
"""

from __future__ import annotations

import base64
import gzip
import importlib.util
from pathlib import Path

from serving.errors import InputError


def packed() -> str:
    """Return the bundle as base64 of gzip. Raises InputError when plotly is not installed."""
    spec = importlib.util.find_spec("plotly")  # found, not imported: importing plotly would cost half a second for nothing
    if spec is None or not spec.submodule_search_locations:
        raise InputError("plotly", "is not installed, and reports draw with it", 'pip install "twinserve[study]"')
    bundle = Path(next(iter(spec.submodule_search_locations))) / "package_data" / "plotly.min.js"
    if not bundle.is_file():
        raise InputError(str(bundle), "is missing from the installed plotly package", "reinstall plotly")
    return base64.b64encode(gzip.compress(bundle.read_bytes(), compresslevel=9, mtime=0)).decode("ascii")
