"""Sessions of those who have signed in: signed cookies, which end with their token, and when they are signed out."""

import hashlib
import hmac
import json
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import NamedTuple

from celery5.app import App
from celery5.broker.calls.dashboard import end_session, is_session_ended
from celery5.dashboard.access import User, check_secret, to_role
from celery5.errors import BrokerDenied

SESSION_LIFE = 12 * 3600.0
"""Seconds after which a user must sign in again."""
MAX_ENDED = 100_000
"""Sessions that were signed out, and are remembered until they would be over."""


class Session(NamedTuple):
    """What a cookie says of a session."""

    user: User
    # What the authenticator knows the token by with which the user has signed in.
    grant: str
    # Unix time.
    expires: float
    # Random.
    id: str


class Sessions:
    """Makes and reads the cookies of sessions.

    They need no store, so that several processes with one secret know them. Only those that were signed out are kept,
    until they would have been over anyway, so that nobody can use such a cookie again: in this process, and in Redis
    where other processes, or the next one, have the same secret.

    Args:
        secret: What signs them; None for a new one, which ends with this process.
        app: Where processes with the same secret tell each other which were signed out.

    Raises:
        Misconfigured: The secret is too short.
    """

    def __init__(self, secret: str | None = None, app: App | None = None) -> None:
        if secret is not None:
            check_secret("the secret of sessions (CELERY5_DASHBOARD_SECRET)", secret)
        self._app = app if secret is not None else None
        self._key = hashlib.sha256((secret or secrets.token_hex(32)).encode()).digest()
        # Browsers do not tell ports apart: each dashboard has its own cookie.
        self.cookie: str = f"celery5_{hashlib.sha256(self._key).hexdigest()[:8]}"
        self._ended: dict[str, float] = {}  # when each would be over, by id

    def make(self, user: User, grant: str = "") -> str:
        """Return the cookie of a new session."""
        words = [*user, grant, time.time() + SESSION_LIFE, secrets.token_hex(16)]
        body = urlsafe_b64encode(json.dumps(words).encode()).decode().rstrip("=")
        return f"{body}.{self._sign(f'session:{body}')}"

    def read(self, cookie: str) -> Session | None:
        """Return a session; None when it is none of ours, is over, or was signed out."""
        body, _, signature = cookie.partition(".")
        if not hmac.compare_digest(self._sign(f"session:{body}").encode(), signature.encode()):
            return None
        name, role, grant, expires, session_id = json.loads(urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        is_over = time.time() >= expires or session_id in self._ended
        known_role = to_role(role)
        return (
            None
            if is_over or known_role is None
            else Session(User(name, known_role), grant, expires, session_id)
        )

    async def is_signed_out(self, session: Session) -> bool:
        """Return whether another process has signed out a session. Raises CeleryError when that cannot be found out."""
        return self._app is not None and await self._app.aperform(
            is_session_ended(self._app.keys, session.id)
        )

    async def end(self, cookie: str) -> str:
        """Sign a session out: its cookie is refused from now on.

        Returns:
            '', or why other processes with the same secret still take the cookie: this user of Redis only reads.

        Raises:
            CeleryError: Other processes cannot be told of it at the moment. The session goes on.
        """
        session = self.read(cookie)
        if session is None:
            return ""
        now, refusal = time.time(), ""
        if self._app is not None:
            call = end_session(self._app.keys, session.id, seconds=session.expires - now)
            try:
                await self._app.aperform(call)
            except BrokerDenied as error:
                refusal = str(error)
        if len(self._ended) >= MAX_ENDED:
            self._ended = {
                session_id: expires for session_id, expires in self._ended.items() if expires > now
            }
        while len(self._ended) >= MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        self._ended[session.id] = session.expires
        return refusal

    def make_form_key(self, user: User, cookie: str) -> str:
        """Return what a form must have that changes something: no other site can know it."""
        return self._sign(f"form:{json.dumps([user.name, cookie])}")

    def is_form_key(self, key: str, user: User, cookie: str) -> bool:
        """Return whether a form has the key of this user and session."""
        return hmac.compare_digest(self.make_form_key(user, cookie).encode(), key.encode())

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(errors="surrogateescape"), hashlib.sha256).hexdigest()
