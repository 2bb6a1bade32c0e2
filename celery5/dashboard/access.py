"""Say who makes a request: by a session, a token, a proxy's headers, or because only one user can open the socket."""

import hashlib
import hmac
import json
import os
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from starlette.requests import HTTPConnection

from celery5.audit.actor import get_user
from celery5.dashboard.operation import ROLES, Role
from celery5.errors import Misconfigured

SESSION_LIFE = 12 * 3600.0
"""Seconds after which a user must sign in again."""
MAX_NAME = 200
"""Characters of a user's name."""
MAX_TOKENS_FILE = 1024 * 1024
"""Bytes of a file of tokens."""


class User(NamedTuple):
    """Who makes a request, and what that person may do."""

    name: str
    role: Role


def to_role(text: str) -> Role | None:
    """Return the role of this name; None when there is none."""
    return _ROLES_BY_NAME.get(text)


_ROLES_BY_NAME: Mapping[str, Role] = {role: role for role in ROLES}


class Authenticator(Protocol):
    """Says who makes a request."""

    def identify(self, request: HTTPConnection) -> User | None:
        """Return who makes a request by what it carries, other than a session; None when it does not say."""
        ...

    def sign_in(self, token: str) -> User | None:
        """Return whose token this is, for a new session; None when it is nobody's."""
        ...

    def confirm(self, user: User) -> bool:
        """Return whether the user of a session still has this role."""
        ...


class Sessions:
    """Sessions as signed cookies: they need no store, and end with the secret.

    Args:
        secret: What signs them; None for a new one, which ends with this process.
    """

    def __init__(self, secret: str | None = None) -> None:
        self._key = hashlib.sha256((secret or secrets.token_hex(32)).encode()).digest()
        # Browsers do not tell ports apart: each dashboard has a cookie of its own.
        self.cookie: str = f"celery5_{hashlib.sha256(self._key).hexdigest()[:8]}"

    def make(self, user: User) -> str:
        """Return the cookie of a new session."""
        words = [*user, time.time() + SESSION_LIFE, secrets.token_hex(8)]
        body = urlsafe_b64encode(json.dumps(words).encode()).decode().rstrip("=")
        return f"{body}.{self._sign(body)}"

    def read(self, cookie: str) -> User | None:
        """Return the user of a session; None when it is none of ours, or is over."""
        body, _, signature = cookie.partition(".")
        if not hmac.compare_digest(self._sign(body).encode(), signature.encode()):
            return None
        name, role, expires, _ = json.loads(urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        return User(name, role) if time.time() < expires else None

    def make_form_key(self, user: User, cookie: str) -> str:
        """Return what a form must have that changes something: no other site can know it."""
        return self._sign(f"form:{user.name}:{cookie}")

    def is_form_key(self, key: str, user: User, cookie: str) -> bool:
        """Return whether a form has the key of this user and session."""
        return hmac.compare_digest(self.make_form_key(user, cookie).encode(), key.encode())

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()


class OneTimeToken:
    """Tokens of which each signs in once, as the user of this process: for a loopback address.

    Args:
        announce: Called with the next token when one has been used.
    """

    def __init__(self, announce: Callable[[str], object] = lambda token: None) -> None:
        self.token: str = secrets.token_urlsafe(32)
        self._announce = announce

    def identify(self, request: HTTPConnection) -> User | None:
        """Return None: a request itself has no token."""
        return None

    def sign_in(self, token: str) -> User | None:
        """Return the user of this process, once for each token."""
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return None
        self.token = secrets.token_urlsafe(32)
        self._announce(self.token)
        return User(get_user(), "admin")

    def confirm(self, user: User) -> bool:
        """Return True: sessions end with this process."""
        return True


class SocketOwner:
    """Everybody is the user of this process: only that user can open the socket."""

    def identify(self, request: HTTPConnection) -> User | None:
        """Return the user of this process."""
        return User(get_user(), "admin")

    def sign_in(self, token: str) -> User | None:
        """Return None: nobody needs to sign in."""
        return None

    def confirm(self, user: User) -> bool:
        """Return True."""
        return True


class TokenFile:
    """Users with tokens, in a file of lines `name role hash`. It is read again when it changes.

    Args:
        path: The file. Others must not be able to write it.

    Raises:
        Misconfigured: It cannot be read, or a line in it is wrong.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._stamp: tuple[int, int] | None = None
        self._users: Mapping[str, User] = {}
        self._read()

    def identify(self, request: HTTPConnection) -> User | None:
        """Return whose token the header `Authorization: Bearer TOKEN` has."""
        token = read_bearer(request)
        return self.sign_in(token) if token else None

    def sign_in(self, token: str) -> User | None:
        """Return whose token this is."""
        self._read()
        return self._users.get(hash_token(token))

    def confirm(self, user: User) -> bool:
        """Return whether the file still has this user, with this role."""
        self._read()
        return user in self._users.values()

    def _read(self) -> None:
        try:
            found = self._path.stat()
            stamp = (found.st_mtime_ns, found.st_size)
            if stamp == self._stamp:
                return
            if found.st_mode & 0o022:
                raise Misconfigured(f"{self._path}: others may write it: chmod 600 {self._path}")
            if found.st_size > MAX_TOKENS_FILE:
                raise Misconfigured(f"{self._path}: it has more than {MAX_TOKENS_FILE} bytes")
            text = self._path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise Misconfigured(f"the tokens of the dashboard cannot be read: {error}") from None
        self._users, self._stamp = read_tokens(text, str(self._path)), stamp


def read_tokens(text: str, where: str) -> dict[str, User]:
    """Return the users in the text of a file of tokens, by the hashes of these. Raises Misconfigured."""
    users: dict[str, User] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        role = to_role(words[1]) if len(words) == 3 else None
        if role is None or len(words[2]) != 64 or len(words[0]) > MAX_NAME:
            raise Misconfigured(
                f"{where}, line {number}: write NAME ROLE HASH, as celery5 dashboard token prints it; "
                f"roles are {', '.join(ROLES)}"
            )
        users[words[2].lower()] = User(words[0], role)
    return users


def hash_token(token: str) -> str:
    """Return the hash of a token. Tokens are random, so one round of SHA-256 is enough."""
    return hashlib.sha256(token.encode()).hexdigest()


class ProxyHeaders:
    """Users that a reverse proxy has authenticated, and names in headers. The proxy must remove these from clients.

    Args:
        user_header: The header with the user's name.
        role_header: The header with the role; '' where all have `default_role`.
        default_role: The role of users without one in a header.
        proxies: The addresses from which the headers are believed; '' is a unix socket.
    """

    def __init__(
        self,
        user_header: str,
        *,
        proxies: Collection[str],
        role_header: str = "",
        default_role: Role = "viewer",
    ) -> None:
        if not user_header or not proxies:
            raise Misconfigured(
                "behind a proxy: give the header with the user's name, and the proxy's address"
            )
        self._user_header = user_header
        self._role_header = role_header
        self._default_role: Role = default_role
        self._proxies = frozenset(proxies)

    def identify(self, request: HTTPConnection) -> User | None:
        """Return the user that the proxy names; None for a request that came another way."""
        peer = request.client.host if request.client and request.client.host else ""
        name = request.headers.get(self._user_header, "").strip()
        if peer not in self._proxies or not 0 < len(name) <= MAX_NAME:
            return None
        text = request.headers.get(self._role_header, "").strip().lower() if self._role_header else ""
        role = self._default_role if not text else to_role(text)
        return None if role is None else User(name, role)

    def sign_in(self, token: str) -> User | None:
        """Return None: the proxy does that."""
        return None

    def confirm(self, user: User) -> bool:
        """Return False: no session stands for the proxy."""
        return False


class Identify:
    """Users that the web application around the dashboard knows.

    Args:
        function: Returns the user of a request, or None; called for each request. It must not block.
    """

    def __init__(self, function: Callable[[HTTPConnection], User | None]) -> None:
        self._function = function

    def identify(self, request: HTTPConnection) -> User | None:
        """Return what the function returns."""
        return self._function(request)

    def sign_in(self, token: str) -> User | None:
        """Return None: the web application around does that."""
        return None

    def confirm(self, user: User) -> bool:
        """Return False: no session of ours stands for the application's."""
        return False


def read_bearer(request: HTTPConnection) -> str:
    """Return the token of the header `Authorization: Bearer TOKEN`, '' for none."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""
