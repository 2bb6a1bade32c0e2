"""Show numbers of bytes to people."""


def format_bytes(count: float | None) -> str:
    """Return bytes in the unit that fits: `512 B`, `1.2 MiB`; `-` for None."""
    if count is None:
        return "-"
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1000:
            return f"{count:.3g} {unit}"
    return f"{count / 1024:.4g} GiB"
