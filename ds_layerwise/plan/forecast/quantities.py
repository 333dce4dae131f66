"""Numbers with their units, as the tables of a plan write them."""

from __future__ import annotations

#: The space before a unit. It is in a word, so that no line ends between a number and its unit, and
#: becomes a plain space where a text is complete.
GLUE = "\ue000"


def size_text(num_bytes: float) -> str:
    """Return bytes in MiB, from 10 GiB on in GiB."""
    if num_bytes >= 10 * 2**30:
        return f"{num_bytes / 2**30:,.1f}{GLUE}GiB"
    return f"{num_bytes / 2**20:,.1f}{GLUE}MiB"


def count_text(numel: int) -> str:
    """Return a number of elements in millions; written out if there are less than 100,000."""
    if numel >= 100_000:
        # A bucket size of a config may be too large for a float.
        millions, tenths = divmod((numel + 50_000) // 100_000, 10)
        return f"{millions:,}.{tenths}{GLUE}M"
    return f"{numel:,}"


def time_text(nanoseconds: float) -> str:
    """Return a time in the largest unit of which it is at least one, of s, ms and us."""
    if nanoseconds >= 1e9:
        return f"{nanoseconds / 1e9:,.2f}{GLUE}s"
    if nanoseconds >= 1e6:
        return f"{nanoseconds / 1e6:.1f}{GLUE}ms"
    return f"{nanoseconds / 1e3:.1f}{GLUE}us"


def work_text(flops: float) -> str:
    """Return floating-point operations in GFLOP, from a thousand on in TFLOP."""
    if flops >= 1e12:
        return f"{flops / 1e12:,.1f}{GLUE}TFLOP"
    return f"{flops / 1e9:,.3g}{GLUE}GFLOP"
