"""Change the URLs of brokers: Celery's for Redis become ours, and those of other brokers are named."""

import ast
import re
from urllib.parse import parse_qsl, urlencode, urlsplit

from celery5.errors import BadBrokerURL
from celery5.migration.project.context import FileContext
from celery5.migration.project.index import get_dotted
from celery5.protocol.brokers import SCHEMES, parse_broker_url

_URL = re.compile(r"[a-z0-9+]+://")
_NAMES = {"broker", "broker_url", "broker_read_url", "broker_write_url"}
_OTHER_BROKER = (
    "redis://host/0: celery5 runs on Redis and Valkey alone; what others send to this broker comes over the bridge "
    "(celery5 docs beside-celery)"
)
_IN_TESTS = "in_memory(app) of celery5.testing in tests; a worker needs Redis: redis://host/0"
_SEVERAL = (
    "redis+sentinel://host:26379,host:26379/service/0, or redis+cluster://host,host: no list of URLs for one server "
    "after the other"
)


def is_url_name(node: ast.AST | None) -> bool:
    """Return whether a name, or the key of a dictionary, is that of the URL of a broker: `CELERY_BROKER_URL`."""
    match node:
        case ast.Constant(value=str(name)):
            pass
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            pass
        case ast.AST():
            name = get_dotted(node).rpartition(".")[2]
        case _:
            return False
    return name.lower().removeprefix("celery_") in _NAMES


def change_urls(context: FileContext, value: ast.expr) -> None:
    """Change the URLs in the value of a setting, a default of `os.environ.get(...)` too, or report what to write."""
    for node in ast.walk(value):
        match node:
            case ast.Constant(value=str(url)) if _URL.match(url) and id(node) not in context.handled:
                context.handled.add(id(node))
                _change_url(context, node, url)
            case _:
                pass


def _change_url(context: FileContext, node: ast.Constant, url: str) -> None:
    new, advice = translate_url(url)
    quoted = context.source.decode(context.source.start_of(node), context.source.end_of(node))
    if advice:
        context.by_hand(node, f"broker {url.partition('://')[0]}://", advice)
    elif new != url and url in quoted:
        context.replace(node, quoted.replace(url, new))
        context.changed(node, f"broker {url.partition('://')[0]}://", f"{new.partition('://')[0]}://")


def translate_url(url: str) -> tuple[str, str]:
    """Return what celery5 writes for a URL of Celery, and what to do by hand: one of them is ''."""
    scheme, _, rest = url.partition("://")
    if ";" in url or (scheme in ("sentinel", "sentinels") and rest):
        return ("", _describe_sentinels(url)) if scheme.startswith("sentinel") else ("", _SEVERAL)
    if scheme == "redis+socket":
        new = _change_socket(url)
    elif scheme in SCHEMES:
        new = _rename_database(url)
    else:
        return "", _IN_TESTS if scheme in ("memory", "filesystem") else _OTHER_BROKER
    try:
        parse_broker_url(new)
    except BadBrokerURL as error:
        return "", str(error).partition(": ")[2] or str(error)
    return new, ""


def _change_socket(url: str) -> str:
    parts = urlsplit(url)
    options = [("db" if name == "virtual_host" else name, text) for name, text in parse_qsl(parts.query)]
    query = urlencode(options, safe="/")
    return f"unix://{parts.netloc}{parts.path}{'?' if query else ''}{query}"


def _rename_database(url: str) -> str:
    return re.sub(r"([?&])virtual_host=/?", r"\1db=", url)


def _describe_sentinels(url: str) -> str:
    """Return the URL to write for those of several sentinels, without the passwords."""
    parts = [urlsplit(part) for part in url.split(";")]
    hosts = ",".join(part.netloc.rpartition("@")[2] or "host:26379" for part in parts)
    database = next((part.path.strip("/") for part in parts if part.path.strip("/")), "0")
    return (
        f"redis+sentinel://{hosts}/SERVICE/{database}, with the password before the hosts; SERVICE is the master_name "
        "of broker_transport_options (celery5 docs sentinel)"
    )
