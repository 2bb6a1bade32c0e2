"""Broker URL: what may stand in the URL of a broker, checked before anything connects.

Floor: protocol. Reads: nothing. Writes: nothing.

The same rules hold where an App is made and where a driver connects, so an invalid URL is refused at the line that
names it. redis-py silently accepts many of them: a database that is no number, a misspelt option.
"""

import re
from urllib.parse import parse_qs, unquote, urlsplit

from celery5.errors import BadBrokerURL
from celery5.protocol.masking import mask_passwords

EXPECTED = (
    "redis://[user:password@]host[:port][/database], rediss://... for TLS, or unix:///path/to.sock[?db=0]"
)
SCHEMES = ("redis", "rediss", "unix")
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
OPTIONS = frozenset({"username", "password", "host", "port", "path", "db", *TLS_OPTIONS})
CERTIFICATE_CHECKS = ("none", "optional", "required")
_HOST = re.compile(r"[\w.-]+|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[\w.-]+)?")
"""A host name, an IPv4 address, or an IPv6 address. A name may have letters beyond ASCII, and underscores."""
_BAD_HOST = "a host name has only letters, digits, dots, hyphens and underscores, and there is one host"


def check_broker_url(url: str) -> None:
    """Check that a text can be the URL of a broker; nothing is looked up and no file is read.

    Raises:
        BadBrokerURL: one line that says what is wrong and what is expected, with the password masked.
    """
    if "#" in str(url):  # what follows would be dropped: a part of the password, the host, the database
        raise make_url_error(url, "it has a #: write %23 for a # in a password or a path")
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except (ValueError, TypeError, AttributeError):
        # The text of the error is dropped: with a badly quoted password it can contain a part of it.
        raise make_url_error(url, "it cannot be understood") from None
    if not url.startswith(tuple(f"{scheme}://" for scheme in SCHEMES)):
        raise make_url_error(url, "it cannot be understood")
    options = {name: values[0] for name, values in parse_qs(parts.query).items()}
    _check_options(url, options)
    if parts.scheme == "unix":
        if not (parts.path or options.get("path")):
            raise make_url_error(url, "it names no socket")
        return
    if host and not _HOST.fullmatch(unquote(host)):
        raise make_url_error(url, _BAD_HOST)
    if port == 0:
        raise make_url_error(url, "the port must be a number from 1 to 65535")
    if not re.fullmatch(r"[0-9]*", parts.path.strip("/")):
        raise make_url_error(url, "the database after the slash must be a number")


def make_url_error(url: object, why: str) -> BadBrokerURL:
    """Return the error for a URL that cannot be used."""
    text = str(url)
    if "//" not in text:  # its form is unknown, but a password would be before the @
        text = f"***{text[text.rfind('@') :]}" if "@" in text else text
    return BadBrokerURL(f"broker URL {mask_passwords(text, maybe_url=True)!r}: {why}; expected {EXPECTED}")


def _check_options(url: str, options: dict[str, str]) -> None:
    if unknown := sorted(set(options) - OPTIONS):
        raise make_url_error(
            url, f"unknown option {', '.join(unknown)} (known: {', '.join(sorted(OPTIONS))})"
        )
    if not re.fullmatch(r"-?[0-9]+", options.get("db", "0")):
        raise make_url_error(url, "it cannot be understood")
    if int(options.get("db", 0)) < 0:
        raise make_url_error(url, "the database must be a number, 0 or more")
    if not _HOST.fullmatch(options.get("host", "localhost")):
        raise make_url_error(url, _BAD_HOST)
    port = options.get("port", "1")
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise make_url_error(url, "the port must be a number from 1 to 65535")
    # Celery's spelling, CERT_NONE, is understood too.
    if options.get("ssl_cert_reqs", "required").lower().removeprefix("cert_") not in CERTIFICATE_CHECKS:
        raise make_url_error(url, f"ssl_cert_reqs is one of {', '.join(CERTIFICATE_CHECKS)}")
