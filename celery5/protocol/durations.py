"""Show durations to people."""


def format_duration(seconds: float) -> str:
    """Return a duration as text: `85 ms`, `12 s`, `2 h 5 min`, `3 d 2 h`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return "{} d {} h".format(*divmod(hours, 24))
