"""Rows of Parquet and Arrow files, of which only the columns that are used are converted."""

import codecs
import csv
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

from fsdpctl.chats.formats import is_used
from fsdpctl.errors import UsageError
from fsdpctl.io.files import MOST_BYTES
from fsdpctl.io.packages import load

_BATCH = 64  # rows that are read at a time


def open_zstd(path: str, raw: IO[bytes]) -> Any:
    return load("pyarrow", path).CompressedInputStream(raw, "zstd")


def objects_of_table(
    path: str, raw: IO[bytes], *, is_parquet: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a table with their numbers, starting at 1.

    Unused columns have the value True in all rows, so that their names can be reported. UsageError
    if the file is damaged.
    """
    arrow, number = load("pyarrow", path), 0
    try:
        names, batches = _parquet(raw) if is_parquet else _stream(arrow, raw)
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise UsageError(f"{path}: column {twice[0]}: appears twice; rename one of them")
        unused = {name: True for name in names if not is_used(name)}
        for batch in batches:
            found = batch.select([n for n in names if n not in unused])
            for row in found.to_pylist() if found.num_columns else [{}] * found.num_rows:
                number += 1
                yield f"row {number}", {**unused, **row}
    except (arrow.ArrowException, OSError, ValueError) as error:
        reason = f"{' '.join(str(error).split()):.200}"
        raise UsageError(f"{path}, row {number + 1}: cannot be read: {reason}") from None


def rows_of_csv(path: str, raw: IO[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a table as text, as `objects_of_table` does; its first line has names."""
    csv.field_size_limit(MOST_BYTES)
    text = codecs.iterdecode(raw, "utf-8-sig")
    rows = csv.reader(text, delimiter="\t" if path.endswith(".tsv") else ",", strict=True)
    try:
        names = next(rows, [])
        for number, row in enumerate(filter(None, rows), start=1):
            if not len(row) == len(names) == len(set(names)):
                what = f"{len(row)} values for the columns {', '.join(names):.100}"
                raise UsageError(f"{path}, row {number}: {what}")
            yield f"row {number}", dict(zip(names, row, strict=True))
    except (csv.Error, ValueError) as error:
        raise UsageError(f"{path}, line {rows.line_num + 1}: cannot be read: {error}") from None


def _parquet(raw: IO[bytes]) -> tuple[list[str], Iterator[Any]]:
    """Return the names of all columns, and batches of those that are used."""
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(raw)
    names = file.schema_arrow.names
    return names, file.iter_batches(_BATCH, columns=[name for name in names if is_used(name)])


def _stream(arrow: Any, raw: IO[bytes]) -> tuple[list[str], Iterator[Any]]:
    """Return the names of the columns and the batches of an Arrow file, as `datasets` writes."""
    if raw.peek(6).startswith(b"ARROW1"):  # type: ignore[attr-defined]
        file = arrow.ipc.open_file(raw)
        return file.schema.names, (file.get_batch(n) for n in range(file.num_record_batches))
    stream = arrow.ipc.open_stream(raw)
    return stream.schema.names, iter(stream)
