"""Reads a tensor of a checkpoint as docs/checkpoint-format.md specifies, without fsdpctl."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128_hexdigest

CHUNK = 1 << 20
DTYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": "u2", "I64": "i8", "I32": "i4", "U8": "u1"}


def check(data: bytes, expected: str, what: str) -> None:
    if xxh3_128_hexdigest(data) != expected:
        raise ValueError(f"{what} is corrupted")


def read_tensor(folder: Path, key: str) -> np.ndarray[Any, Any]:
    text = (folder / "manifest.json").read_text(encoding="utf-8")
    manifest = json.loads(text)
    check(text.replace(manifest["xxh3"], "0" * 32).encode(), manifest["xxh3"], "manifest.json")
    options, filled = manifest["tensors"][key], 0
    whole = np.zeros(int(np.prod(options["shape"], dtype=int)), DTYPES[options["dtype"]])
    for name, file in manifest["files"].items():
        content = np.memmap(folder / name, np.uint8, "r")
        begin = 8 + int.from_bytes(content[:8].tobytes(), "little")
        check(content[:begin].tobytes(), file["xxh3"], name)
        header = json.loads(content[8:begin].tobytes())
        if key in header:
            start, stop, digests = json.loads(header["__metadata__"]["fsdpctl.spans"])[key]
            first, end = header[key]["data_offsets"]
            data = content[begin + first : begin + end].tobytes()
            for number in range(len(digests) // 32):
                expected = digests[32 * number : 32 * (number + 1)]
                check(data[number * CHUNK : (number + 1) * CHUNK], expected, f"{key} in {name}")
            whole[start:stop] = np.frombuffer(data, whole.dtype)
            filled += stop - start
    if filled != whole.size:
        raise ValueError(f"{key}: {whole.size - filled} elements are missing")
    return whole.reshape(options["shape"])  # bfloat16 as its 16 bits


if __name__ == "__main__":
    print(read_tensor(Path(sys.argv[1]), sys.argv[2]))
