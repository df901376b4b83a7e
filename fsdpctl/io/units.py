"""Numbers with units, as text."""

_GIB, _MIB = 1 << 30, 1 << 20


def format_bytes(count: float) -> str:
    """Format a number of bytes in GiB or MiB."""
    sign, size = "-" * (count < 0), abs(count)
    return f"{sign}{size / _GIB:.2f} GiB" if size >= _GIB else f"{sign}{size / _MIB:.1f} MiB"
