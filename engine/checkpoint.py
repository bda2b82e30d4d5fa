"""A folder of safetensors shards in Hugging Face's layout: what is stored where, checked before anything is read.

A shard is 8 bytes (little-endian length of the header), a JSON header (name -> dtype, shape, data_offsets), then the data
(the safetensors format). The header is parsed here because a damaged shard must be reported by file *and* tensor; the data is read by the library.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from serving.errors import InputError
from serving.files import read_json_object

MANIFEST = "SHA384SUMS"


class Stored(NamedTuple):
    """One tensor of a checkpoint: its file, dtype as safetensors names it (``BF16``, ``I32``, ``F8_E4M3``...) and shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of a folder by name. ``read`` returns one of them on the CPU."""

    def __init__(self, folder: Path) -> None:
        """List the folder's tensors. Raises InputError for a missing, truncated or damaged shard, naming file and tensor."""
        self.folder = folder
        self.tensors: dict[str, Stored] = {}
        index = folder / "model.safetensors.index.json"
        owner = read_json_object(index).get("weight_map", {}) if index.is_file() else {}
        files = sorted({folder / name for name in owner.values()}) if owner else sorted(folder.glob("*.safetensors"))
        if not files:
            raise InputError(str(folder), "holds no .safetensors file", _other_formats(folder))
        for file in files:
            if not file.is_file():
                lost = next(name for name, shard in owner.items() if folder / shard == file)
                raise InputError(str(file), f"is missing; it should hold tensor '{lost}'", f"named by {index.name}")
            self.tensors |= _read_header(file)
        for name, shard in owner.items():
            if name not in self.tensors:
                raise InputError(str(folder / shard), f"has no tensor '{name}'", f"named by {index.name}")

    def read(self, name: str) -> Tensor:
        """Return tensor ``name`` as stored, on the CPU."""
        from safetensors import SafetensorError, safe_open

        file = self.tensors[name].file
        try:
            with safe_open(file, framework="pt") as shard:
                return shard.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(str(file), f"tensor '{name}' cannot be read: {error}") from None


def _other_formats(folder: Path) -> str:
    if not folder.is_dir():
        return "there is no such folder"
    others = sorted({file.suffix for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".gguf")})
    return f"{', '.join(others)} files are not read: convert them to safetensors" if others else "expected model.safetensors or shards with an index"


def _read_header(file: Path) -> dict[str, Stored]:
    size = file.stat().st_size
    with file.open("rb") as data:
        start = data.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            raise InputError(str(file), f"is truncated within its header ({size} bytes)")
        try:
            header = json.loads(data.read(length))
            entries = {name: Stored(file, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items() if name != "__metadata__"}
            ends = {name: 8 + length + header[name]["data_offsets"][1] for name in entries}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise InputError(str(file), f"has a damaged header: {error}") from None
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        if end > size:
            raise InputError(str(file), f"is truncated: tensor '{name}' ends at byte {end} of {size}", "download it again")
    return entries


def _digest(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha384").hexdigest()


def write_manifest(folder: Path) -> Path:
    """Write the SHA-384 manifest of a folder's weights and configuration, in the format of ``sha384sum``; return its path."""
    files = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".json"))
    manifest = folder / MANIFEST
    manifest.write_text("".join(f"{_digest(file)}  {file.name}\n" for file in files))
    return manifest


def verify_manifest(folder: Path, manifest: Path) -> None:
    """Compare every weight and configuration file with its SHA-384 digest before any of them is used.

    Raises InputError for a digest that differs, a listed file that is missing, or a weight or configuration file that is not listed.
    """
    listed: dict[str, str] = {}
    try:
        for number, line in enumerate(manifest.read_text().splitlines(), 1):
            digest, _, name = line.partition("  ")
            if len(digest) != 96 or not name:
                raise InputError(f"{manifest}:{number}", "is not 'SHA-384 digest, two spaces, file name'")
            listed[name] = digest
    except OSError as error:
        raise InputError(str(manifest), f"cannot be read: {error}") from None
    for file in sorted(folder.iterdir()):
        if file.suffix in (".safetensors", ".json") and file.name not in listed:
            raise InputError(str(file), "is not in the manifest", f"refused by {manifest.name}")
    for name, digest in listed.items():
        file = folder / name
        if not file.is_file():
            raise InputError(str(file), "is in the manifest but missing", f"refused by {manifest.name}")
        if _digest(file) != digest:
            raise InputError(str(file), "does not have the digest in the manifest", f"refused by {manifest.name}")
