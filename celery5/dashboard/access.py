"""Say who makes a request: by a token, by a proxy's headers, or as the application around the dashboard does."""

import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple, Protocol

from starlette.requests import HTTPConnection

from celery5.audit.actor import get_user
from celery5.broker.servers.kept_folder import check_owned
from celery5.errors import Misconfigured
from celery5.operations.operation import ROLES, Role

MAX_NAME = 200
"""Characters of a user's name."""
MAX_TOKENS_FILE = 1024 * 1024
"""Bytes of a file of tokens."""
MIN_SECRET = 32
"""Bytes of a secret that somebody has chosen: of fewer, all can be tried."""
PROXY_SECRET_HEADER = "X-Celery5-Proxy-Secret"
"""The header with the secret of a proxy, unless another one is named."""


class User(NamedTuple):
    """Who makes a request, and what that person may do."""

    name: str
    role: Role


def to_role(text: str) -> Role | None:
    """Return the role of this name; None when there is none."""
    return _ROLES_BY_NAME.get(text)


_ROLES_BY_NAME: Mapping[str, Role] = {role: role for role in ROLES}


class SignedIn(NamedTuple):
    """Whose token it was, and what the authenticator knows it by: a session lasts no longer than its token."""

    user: User
    grant: str = ""


class Authenticator(Protocol):
    """Says who makes a request."""

    takes_links: bool
    """Whether a token may be in an address: only one that is of no use afterwards."""

    def identify(self, request: HTTPConnection) -> User | None:
        """Return who makes a request by what it carries, other than a session; None when it does not say."""
        ...

    def is_by_bearer(self, request: HTTPConnection) -> bool:
        """Return whether it is the header `Authorization: Bearer TOKEN` by which `identify` knows the user.

        No browser sends that by itself. All else a browser may send for another site, so forms then need their key.
        """
        ...

    def sign_in(self, token: str) -> SignedIn | None:
        """Return whose token this is, for a new session; None when it is nobody's."""
        ...

    def confirm(self, user: User, grant: str) -> bool:
        """Return whether the token of a session is still this user's."""
        ...


def check_secret(what: str, secret: str) -> None:
    """Raise Misconfigured when a secret is so short that it can be guessed."""
    length = len(secret.encode(errors="surrogateescape"))
    if length < MIN_SECRET:
        raise Misconfigured(
            f"{what} has {length} bytes and needs at least {MIN_SECRET}: make one with openssl rand -hex 32"
        )


class OneTimeToken:
    """Tokens of which each signs in once, as the user of this process: for a loopback address, or a unix socket.

    Args:
        announce: Called with the next token when one has been used.
    """

    takes_links = True

    def __init__(self, announce: Callable[[str], object] = lambda token: None) -> None:
        self.token: str = secrets.token_urlsafe(32)
        self._announce = announce

    def identify(self, request: HTTPConnection) -> User | None:
        """Return None: a request itself has no token."""
        return None

    def is_by_bearer(self, request: HTTPConnection) -> bool:
        """Return False."""
        return False

    def sign_in(self, token: str) -> SignedIn | None:
        """Return the user of this process, once for each token."""
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return None
        self.token = secrets.token_urlsafe(32)
        self._announce(self.token)
        return SignedIn(User(get_user(), "admin"))

    def confirm(self, user: User, grant: str) -> bool:
        """Return True: sessions end with this process."""
        return True


class TokenGrant(NamedTuple):
    """Whose a token is, and until when."""

    user: User
    # Unix time; None for ever.
    expires: float | None = None

    @property
    def is_valid(self) -> bool:
        return self.expires is None or time.time() < self.expires


class TokenFile:
    """Users with tokens, in a file of lines `name role hash [expires]`. It is read again when it changes.

    Args:
        path: The file: of the user of this process, or of root, and nobody else may be able to write or replace it.

    Raises:
        Misconfigured: It cannot be read, or a line in it is wrong.
    """

    takes_links = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._stamp: tuple[int, ...] | None = None
        self._grants: Mapping[str, TokenGrant] = {}
        self._read()

    def identify(self, request: HTTPConnection) -> User | None:
        """Return whose token the header `Authorization: Bearer TOKEN` has."""
        token = read_bearer(request)
        signed_in = self.sign_in(token) if token else None
        return None if signed_in is None else signed_in.user

    def is_by_bearer(self, request: HTTPConnection) -> bool:
        """Return True: it looks at nothing else."""
        return True

    def sign_in(self, token: str) -> SignedIn | None:
        """Return whose token this is."""
        self._read()
        found = hash_token(token)
        grant = self._grants.get(found)
        return SignedIn(grant.user, found) if grant is not None and grant.is_valid else None

    def confirm(self, user: User, grant: str) -> bool:
        """Return whether the file still has this token, for this user, with this role, and it has not expired."""
        self._read()
        known = self._grants.get(grant)
        return known is not None and known.user == user and known.is_valid

    def _read(self) -> None:
        try:
            with open(self._path, "rb") as opened:
                found = os.fstat(opened.fileno())
                stamp = (found.st_mtime_ns, found.st_size, found.st_ino, found.st_ctime_ns)
                if stamp == self._stamp:
                    return
                check_owned(found, str(self._path))
                # Of a link, too: whoever can write a folder can replace what is in it.
                for folder in {self._path.absolute().parent, self._path.resolve().parent}:
                    check_owned(os.stat(folder), str(folder))
                if found.st_size > MAX_TOKENS_FILE:
                    raise Misconfigured(f"{self._path}: it has more than {MAX_TOKENS_FILE} bytes")
                text = opened.read(MAX_TOKENS_FILE).decode()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise Misconfigured(
                f"the tokens of the dashboard cannot be read: {self._path}: {reason}"
            ) from None
        self._grants, self._stamp = read_tokens(text, str(self._path)), stamp


def read_tokens(text: str, where: str) -> dict[str, TokenGrant]:
    """Return whose tokens are in the text of a file of tokens, by the hashes of these. Raises Misconfigured."""
    grants: dict[str, TokenGrant] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        role = to_role(words[1]) if len(words) in (3, 4) else None
        try:
            expires = datetime.fromisoformat(words[3]) if len(words) == 4 else None
        except ValueError:
            role, expires = None, None
        if role is None or not _HASH.fullmatch(words[2]) or len(words[0]) > MAX_NAME:
            raise Misconfigured(
                f"{where}, line {number}: write NAME ROLE HASH, and a date such as 2030-12-31 if it expires, as "
                f"celery5 dashboard token prints it; roles are {', '.join(ROLES)}"
            )
        if expires is not None and expires.tzinfo is None:
            expires = expires.replace(tzinfo=UTC)
        until = None if expires is None else expires.timestamp()
        grants[words[2].lower()] = TokenGrant(User(words[0], role), until)
    return grants


_HASH = re.compile(r"[0-9A-Fa-f]{64}")


def hash_token(token: str) -> str:
    """Return the hash of a token. Tokens are random, so one round of SHA-256 is enough."""
    return hashlib.sha256(token.encode()).hexdigest()


class ProxyHeaders:
    """Users that a reverse proxy has authenticated, and names in headers.

    The proxy must set all of these headers in each request, so that none of a client's gets through. Without a secret,
    whatever runs on the proxy's host can send them, too.

    Args:
        user_header: The header with the user's name.
        role_header: The header with the role; '' where all have `default_role`.
        default_role: The role of users without one in a header.
        proxies: The addresses from which the headers are believed; '' is a unix socket.
        secret: What the proxy sends in `secret_header`, of at least 32 bytes; '' for none.
        secret_header: The header with the secret.

    Raises:
        Misconfigured: The name of a header or an address is missing, or the secret is too short.
    """

    takes_links = False

    def __init__(
        self,
        user_header: str,
        *,
        proxies: Collection[str],
        role_header: str = "",
        default_role: Role = "viewer",
        secret: str = "",
        secret_header: str = PROXY_SECRET_HEADER,
    ) -> None:
        if not user_header or not proxies or not secret_header:
            raise Misconfigured(
                "behind a proxy: give the header with the user's name, and the proxy's address"
            )
        if secret:
            check_secret("the secret of the proxy (CELERY5_DASHBOARD_PROXY_SECRET)", secret)
        self._user_header = user_header
        self._role_header = role_header
        self._default_role: Role = default_role
        self._proxies = frozenset(map(_simplify_address, proxies))
        self._secret = secret.encode(errors="surrogateescape")
        self._secret_header = secret_header
        self.warning: str = "" if secret else _describe_risk(user_header, role_header, sorted(self._proxies))
        """What is not safe about this; '' for nothing."""

    def identify(self, request: HTTPConnection) -> User | None:
        """Return the user that the proxy names; None for a request that came another way.

        A header that is there twice is a client's beside the proxy's: nobody can tell which is which.
        """
        client = request.client
        if _simplify_address(client.host if client and client.host else "") not in self._proxies:
            return None
        if self._secret and not hmac.compare_digest(
            self._get_one(request, self._secret_header).encode("latin-1"), self._secret
        ):
            return None
        name = self._get_one(request, self._user_header).strip()
        roles = request.headers.getlist(self._role_header) if self._role_header else []
        if not 0 < len(name) <= MAX_NAME or len(roles) > 1:
            return None
        text = roles[0].strip().lower() if roles else ""
        role = self._default_role if not text else to_role(text)
        return None if role is None else User(name, role)

    def names_user(self, request: HTTPConnection) -> bool:
        """Return whether a request has the header with a user, whoever has sent it."""
        return self._user_header in request.headers

    def _get_one(self, request: HTTPConnection, header: str) -> str:
        values = request.headers.getlist(header)
        return values[0] if len(values) == 1 else ""

    def is_by_bearer(self, request: HTTPConnection) -> bool:
        """Return False: whatever the proxy looks at, a browser may send it by itself."""
        return False

    def sign_in(self, token: str) -> SignedIn | None:
        """Return None: the proxy does that."""
        return None

    def confirm(self, user: User, grant: str) -> bool:
        """Return False: no session stands for the proxy."""
        return False


def _simplify_address(address: str) -> str:
    """Return an address in the form in which it is compared: an IPv4 address may come in an IPv6 one."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or parsed)


def _describe_risk(user_header: str, role_header: str, proxies: Sequence[str]) -> str:
    headers = " and ".join(filter(None, (user_header, role_header)))
    places = ", ".join(place or "the socket" for place in proxies)
    return (
        f"whoever can connect from {places} is believed in {headers}, on the proxy's host every user and program: set "
        f"CELERY5_DASHBOARD_PROXY_SECRET, and have the proxy send it in {PROXY_SECRET_HEADER}"
    )


class Identify:
    """Users that the web application around the dashboard knows.

    Args:
        function: Returns the user of a request, or None; called for each request. It must not block.
        by_bearer: Returns whether it is the header `Authorization: Bearer TOKEN` alone that the function knows the user
            of a request by. Such requests need no key of a form, since no browser sends them by itself.
    """

    takes_links = False

    def __init__(
        self,
        function: Callable[[HTTPConnection], User | None],
        *,
        by_bearer: Callable[[HTTPConnection], bool] = lambda request: False,
    ) -> None:
        self._function = function
        self._by_bearer = by_bearer

    def identify(self, request: HTTPConnection) -> User | None:
        """Return what the function returns."""
        return self._function(request)

    def is_by_bearer(self, request: HTTPConnection) -> bool:
        """Return what the other function returns."""
        return self._by_bearer(request)

    def sign_in(self, token: str) -> SignedIn | None:
        """Return None: the web application around does that."""
        return None

    def confirm(self, user: User, grant: str) -> bool:
        """Return False: no session of ours stands for the application's."""
        return False


def read_bearer(request: HTTPConnection) -> str:
    """Return the token of the header `Authorization: Bearer TOKEN`, '' for none."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""
