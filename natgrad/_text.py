"""Numbers and tables for people to read."""

from collections.abc import Sequence


def size(count: int) -> str:
    """A number of bytes."""
    for factor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"


def number(value: float) -> str:
    """To three digits."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def duration(seconds: float) -> str:
    if seconds >= 90:
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[k]) for row in (header, *rows)) for k in range(len(header))]
    line = lambda row: "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    return "\n".join([line(header), line(tuple("-" * width for width in widths)), *map(line, rows)])
