"""The memory of ranks that train on much text: `python -m benchmarks.corpus [--out FILE.json]`.

Two CPU ranks train the default model on a file of random words, once of 20 MiB and once of 2 GiB.
The private bytes of a rank exclude pages of mapped files, which the system may drop. Their maximum
before the first step is what opening the data needs.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.growth import RANKS, reads
from benchmarks.report import arguments, write_report

MIB = 1 << 20
WORDS, LINE = 5000, 12  # different words; words per line


def write_text(path: Path, size: int) -> None:
    """Write lines of random words, `size` bytes in total."""
    generator = np.random.default_rng(0)
    args = ["".join(map(chr, generator.integers(97, 123, 2 + n % 9))) for n in range(WORDS)]
    with path.open("w") as file:
        while file.tell() < size:
            drawn = generator.zipf(1.3, (5000, LINE)) % WORDS
            file.writelines(f"{' '.join(args[each] for each in row)}\n" for row in drawn)
        file.truncate(size)


def main() -> None:
    """Measure, print and write."""
    options = arguments(mib=(20, 2048), steps=60)
    results: list[dict[str, Any]] = []
    for size in options.mib:
        with tempfile.TemporaryDirectory() as folder:
            text = Path(folder, "text.txt")
            write_text(text, size * MIB)
            settings = (f"data.path={text}", "data=text", "data.val_fraction=0")
            memory = list(reads(Path(folder), options.steps, 16, *settings))
        most = max(max(private) for _, private, _ in memory if private)
        row = {"text_mib": size, "own_mib": round(most / MIB, 1)}
        first = (results or [row])[0]["own_mib"]
        results.append({**row, "over_first_mib": round(row["own_mib"] - first, 1)})
    print(*results, sep="\n")
    write_report(options.out, "corpus", results, world_size=RANKS, model="llama_tiny")


if __name__ == "__main__":
    main()
