"""Rows of Parquet files, with the `parquet` extra."""

from collections.abc import Iterator
from typing import Any

from fsdpctl.errors import UsageError

_ROWS = 256  # made into objects at once


def objects_of_parquet(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a file as objects, with their numbers, from one.

    Raises:
        UsageError: there is no pyarrow, or the file is none of its.
    """
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UsageError(f"{path}: takes `pip install 'fsdpctl[parquet]'`") from None
    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (ArrowException, OSError, ValueError) as error:
        raise UsageError(
            f"{path}, row {number + 1}: cannot be read: {' '.join(str(error).split()):.200}"
        ) from None
