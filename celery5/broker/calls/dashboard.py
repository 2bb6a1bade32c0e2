"""Build the calls by which dashboards that share a secret know of sessions that were signed out."""

from celery5.broker.call import Call, to_ms
from celery5.broker.keys import Keys


def end_session(keys: Keys, session: str, *, seconds: float) -> Call[bool]:
    """Remember that a session was signed out, for this many seconds."""
    return Call(("SET", keys.signed_out(session), "1", "PX", max(to_ms(seconds), 1)), bool, repeatable=True)


def is_session_ended(keys: Keys, session: str) -> Call[bool]:
    """Return whether a session was signed out."""
    return Call(("EXISTS", keys.signed_out(session)), bool, repeatable=True)
