"""Rows of Parquet and Arrow files, of which only the columns that are used are converted."""

from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

from fsdpctl.data.chats.formats import is_used
from fsdpctl.errors import UsageError

_BATCH = 256  # rows that are read at a time
_TEXTS = ("string", "large_string", "binary", "large_binary")


def open_zstd(path: str, raw: IO[bytes]) -> Any:
    """Return the content of a file that zstd has compressed."""
    return _pyarrow(path).CompressedInputStream(raw, "zstd")


def _pyarrow(path: str) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UsageError(f"{path}: requires pyarrow; `pip install pyarrow`") from None
    return pyarrow


def objects_of_table(
    path: str, raw: IO[bytes], most_bytes: int, *, is_parquet: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a table with their numbers, starting at 1.

    Unused columns have the value True in all rows, so that their names can be reported.

    Raises:
        UsageError: If a row is longer than `most_bytes`, or if the file is damaged.
    """
    arrow, number = _pyarrow(path), 0
    try:
        names, batches = _parquet(path, raw) if is_parquet else _stream(arrow, raw)
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise UsageError(f"{path}: column {twice[0]}: appears twice; rename one of them")
        unused = {name: True for name in names if not is_used(name)}
        for batch in batches:
            for piece in _pieces(batch.select([n for n in names if n not in unused]), most_bytes):
                if piece is None:
                    where = f"{path}, row {number + 1}"
                    raise UsageError(f"{where}: longer than the limit of {most_bytes >> 20} MiB")
                for row in piece.to_pylist() if piece.num_columns else [{}] * piece.num_rows:
                    number += 1
                    yield f"row {number}", {**unused, **row}
    except (arrow.ArrowException, OSError, ValueError) as error:
        reason = f"{' '.join(str(error).split()):.200}"
        raise UsageError(f"{path}, row {number + 1}: cannot be read: {reason}") from None


def _parquet(path: str, raw: IO[bytes]) -> tuple[list[str], Iterator[Any]]:
    """Return the names of all columns, and batches of those that are used.

    Texts are read as a dictionary of the different ones, however often they are repeated.
    """
    from pyarrow.parquet import ParquetFile

    about = ParquetFile(raw)
    leaves = [about.metadata.schema.column(n) for n in range(about.metadata.num_columns)]
    used = [n for n, leaf in enumerate(leaves) if is_used(leaf.path.partition(".")[0])]
    texts = [
        leaves[n].path
        for n in used
        if leaves[n].physical_type == "BYTE_ARRAY" and leaves[n].logical_type.type != "DECIMAL"
    ]
    names = about.schema_arrow.names
    file = ParquetFile(raw, read_dictionary=texts)
    return names, file.iter_batches(_BATCH, columns=[name for name in names if is_used(name)])


def _stream(arrow: Any, raw: IO[bytes]) -> tuple[list[str], Iterator[Any]]:
    """Return the names of the columns and the batches of an Arrow file, as `datasets` writes."""
    if raw.peek(6).startswith(b"ARROW1"):  # type: ignore[attr-defined]
        file = arrow.ipc.open_file(raw)
        return file.schema.names, (file.get_batch(n) for n in range(file.num_record_batches))
    stream = arrow.ipc.open_stream(raw)
    return stream.schema.names, iter(stream)


def _pieces(batch: Any, most_bytes: int) -> Iterator[Any]:
    """Yield parts of a batch that unfold to at most `most_bytes`, None if a row is longer."""
    if sum(_unfolded(column) for column in batch.columns) <= most_bytes:
        yield batch
    elif batch.num_rows == 1:
        yield None
    else:
        half = batch.num_rows // 2
        yield from _pieces(batch.slice(0, half), most_bytes)
        yield from _pieces(batch.slice(half), most_bytes)


def _unfolded(array: Any) -> int:
    """Return about how many bytes of text an array has, with each repetition."""
    from pyarrow import compute, types

    size: int = array.nbytes
    if types.is_dictionary(array.type) and str(array.type.value_type) in _TEXTS:
        lengths = compute.binary_length(array.dictionary).take(array.indices)
        size += compute.sum(lengths).as_py() or 0
    elif types.is_map(array.type):
        raise ValueError("maps are not supported; expected structs, or text that is JSON")
    elif types.is_struct(array.type):
        size = sum(map(_unfolded, array.flatten()))
    elif types.is_nested(array.type) and hasattr(array, "flatten"):
        size = _unfolded(array.flatten())
    return size
