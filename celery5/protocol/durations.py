"""Show durations, and how long ago something was, to people."""

import math


def format_duration(seconds: float) -> str:
    """Return a duration as text: `85 ms`, `12 s`, `2 h 5 min`, `3 d 2 h`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return "{} d {} h".format(*divmod(hours, 24))


def format_shortest(seconds: float) -> str:
    """Return a duration as settings, flags and parameters take it, in the largest unit without a fraction: `1h`."""
    units = {86400: "d", 3600: "h", 60: "m"}
    size = next((size for size in units if seconds and seconds % size == 0), 1)
    return f"{seconds / size:g}{units.get(size, '')}"


def format_range(least: float, most: float) -> str:
    """Return the bounds of a duration, for help and errors: `1m<=x<=90d`; a bound that is infinite is left out."""
    upper = "" if math.isinf(most) else f"<={format_shortest(most)}"
    return f"{format_shortest(least)}<=x{upper}"


def format_age(moment: float, now: float) -> str:
    """Return how long ago a time was, or in how long it comes: `just now`, `12 s ago`, `in 2 h 5 min`.

    Whole seconds: clocks differ by more than what is below, and text is read some time after it was made. The pages of
    the dashboard keep their ages going by the same rule (`ages.js`).

    Args:
        moment: The time, in seconds since 1970.
        now: The time now, by the same clock.
    """
    seconds = int(abs(now - moment))
    if not seconds:
        return "just now"
    span = format_duration(seconds)
    return f"{span} ago" if moment <= now else f"in {span}"
