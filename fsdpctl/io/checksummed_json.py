"""JSON with its own checksum: the manifest of a checkpoint, and the checksums of an export."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from fsdpctl.errors import CheckpointError
from fsdpctl.io.files import nearest_path_hint, read_text_file
from fsdpctl.io.run_files import CHECKSUMS, MANIFEST
from fsdpctl.io.untrusted import check_version, parse_json

MANIFEST_FORMAT, CHECKSUMS_FORMAT = "fsdpctl-checkpoint", "fsdpctl-checksums"
# The file name, version and noun of each format.
_FORMATS = {
    MANIFEST_FORMAT: (MANIFEST, 2, "the manifest of a checkpoint"),
    CHECKSUMS_FORMAT: (CHECKSUMS, 1, "the checksums of an export"),
}
_BLANK = "0" * 32


def checksummed(content: Mapping[str, Any], format_name: str = MANIFEST_FORMAT) -> str:
    """Return the text of a JSON file of a format, by default a manifest.

    The key `xxh3` has the checksum of the text in which zeros replace the checksum itself.
    """
    version = _FORMATS[format_name][1]
    document = {"format": format_name, "version": version, **content, "xxh3": _BLANK}
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    head, _, tail = text.rpartition(_BLANK)
    return head + _checksum(text) + tail


def _checksum(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def read_checksummed(folder: Path, format_name: str = MANIFEST_FORMAT) -> dict[str, Any]:
    """Read and verify the file in `folder` of the format `format_name`, by default the manifest.

    CheckpointError if the file is missing, corrupted, or has an unsupported version.
    """
    name, version, noun = _FORMATS[format_name]
    path = folder / name
    if not path.exists():
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: not found{nearest_path_hint(str(folder))}")
        raise CheckpointError(f"{path}: not found")
    text = read_text_file(path, CheckpointError)
    location = f"{path}: corrupted"
    # A user's metrics may be infinite, so the manifest may contain such numbers.
    content = parse_json(text, dict[str, Any], location, CheckpointError, finite=False)
    check_version(content, (format_name, version), noun, str(path), CheckpointError)
    head, digest, tail = text.rpartition(str(content.get("xxh3")))
    if not digest or _checksum(head + _BLANK + tail) != digest:
        raise CheckpointError(f"{location}: the checksum does not match")
    return content
