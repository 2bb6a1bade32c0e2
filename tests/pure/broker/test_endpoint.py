"""Endpoint: what a broker URL means, and what a wrong one is told."""

import os
import ssl
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import connection as redis_connection

from celery5 import App
from celery5.broker.endpoint import Endpoint
from celery5.errors import BadBrokerURL, Misconfigured
from celery5.protocol.brokers import parse_broker_url
from celery5.protocol.masking import mask_passwords
from tests.tls_files import write_certificates


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("redis://", Endpoint()),
        ("redis://h:1/3", Endpoint(host="h", port=1, db=3)),
        ("redis://h?db=3", Endpoint(host="h", db=3)),
        ("redis://[::1]:7000/1", Endpoint(host="::1", port=7000, db=1)),
        ("redis://:p%40ss@h", Endpoint(host="h", password="p@ss")),
        ("redis://clerk:1234%235@h", Endpoint(host="h", username="clerk", password="1234#5")),
        ("redis://shop_redis-1.b\u00fccher.", Endpoint(host="shop_redis-1.b\u00fccher.")),
        ("redis://10.0.0.1", Endpoint(host="10.0.0.1")),
        ("redis://[fe80::1%25eth0]", Endpoint(host="fe80::1%eth0")),
        ("redis://u:p@h", Endpoint(host="h", username="u", password="p")),
        ("unix:///run/redis.sock?db=2", Endpoint(kind="unix", path="/run/redis.sock", db=2)),
        (
            "unix://u:p@/run/redis.sock",
            Endpoint(kind="unix", path="/run/redis.sock", username="u", password="p"),
        ),
        (
            "rediss://h?ssl_cert_reqs=CERT_NONE&ssl_ca_certs=ca.pem&ssl_check_hostname=no",
            Endpoint(
                kind="tls", host="h", ssl_cert_reqs="none", ssl_ca_certs="ca.pem", ssl_check_hostname=False
            ),
        ),
        (
            "redis+sentinel://u:p%40ss@a:1,b,[::1]:3/shop/2?sentinel_username=su&sentinel_password=sp",
            Endpoint(
                topology="sentinel",
                nodes=(("a", 1), ("b", 26379), ("::1", 3)),
                service="shop",
                db=2,
                username="u",
                password="p@ss",
                sentinel_username="su",
                sentinel_password="sp",
            ),
        ),
        (
            "rediss+sentinel://a?service=shop&ssl_ca_certs=ca.pem",
            Endpoint(
                kind="tls", topology="sentinel", nodes=(("a", 26379),), service="shop", ssl_ca_certs="ca.pem"
            ),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_url_names_an_endpoint(url: str, endpoint: Endpoint) -> None:
    assert Endpoint.from_url(url) == endpoint


_TEXT = st.text(st.characters(codec="utf-8"), max_size=8)


@given(
    scheme=st.sampled_from(["redis", "rediss", "unix"]),
    login=st.none() | st.tuples(_TEXT, _TEXT),
    host=st.sampled_from(
        ["", "h", "shop_redis-1.example", "10.0.0.1", "[::1]", "[fe80::1%25eth0]", "B%C3%BCcher"]
    ),
    port=st.none() | st.integers(1, 65535),
    path=st.sampled_from(["", "/", "/3", "/03/", "/run/a%20b.sock"]),
    options=st.dictionaries(
        st.sampled_from(
            ["db", "username", "password", "host", "port", "path", "ssl_check_hostname", "ssl_keyfile"]
        ),
        st.sampled_from(["1", "0", "no", "F", "h2", "a%40b", "/x"]),
    ),
)
def test_a_url_means_what_it_means_to_redis_py(
    scheme: str,
    login: tuple[str, str] | None,
    host: str,
    port: int | None,
    path: str,
    options: dict[str, str],
) -> None:
    user = "" if login is None else f"{quote(login[0], safe='')}:{quote(login[1], safe='')}@"
    place = f"{user}{host}{'' if port is None else f':{port}'}"
    url = f"{scheme}://{place}{path}?{'&'.join(f'{name}={text}' for name, text in options.items())}"
    with suppress(BadBrokerURL):
        fields = parse_broker_url(url)
        assert fields.pop("kind") == {"redis": "tcp", "rediss": "tls", "unix": "unix"}[scheme]
        theirs = redis_connection.parse_url(url)  # type: ignore[no-untyped-call]
        theirs.pop("connection_class", None)
        theirs |= {"port": int(theirs["port"])} if "port" in theirs else {}
        assert fields == theirs


def test_options_win_over_the_url() -> None:
    assert Endpoint.from_url("redis://u:p@h/1", db=2, password="q") == Endpoint(
        host="h", username="u", password="q", db=2
    )


WRONG = pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://h", "cannot be understood"),
        ("localhost:6379", "cannot be understood"),
        ("", "cannot be understood"),
        ("redis://h:99999", "cannot be understood"),
        ("redis://h:port", "cannot be understood"),
        ("redis://h/one", "must be a number"),
        ("redis://h/0/1", "must be a number"),
        ("redis://h?db=-1", "0 or more"),
        ("redis://h?db=x", "cannot be understood"),
        ("redis://h?socket_timeoot=3", "unknown option socket_timeoot"),
        ("rediss://h?ssl_cert_reqs=maybe", "none, optional, required"),
        ("unix://", "names no socket"),
        ("redis://user:se/cret@h", "cannot be understood"),
        ("redis://user:secret@h?db=x&password=secret", "cannot be understood"),
        ("redis://two words:6379", "letters, digits"),
        ("redis://h:0", "from 1 to 65535"),
        ("redis://h?port=many", "from 1 to 65535"),
        ("redis://h?port=0", "from 1 to 65535"),
        ("redis://h?port=65536", "from 1 to 65535"),
        ("redis://clerk:1234#secret@host/0", "write %23"),
        ("redis://clerk:secret#5@host/0", "write %23"),
        ("redis://h/0#x", "write %23"),
        ("unix:///run/a#b.sock", "write %23"),
        ("redis://h,h2/0", "there is one host"),
        ("redis://h?host=h,h2", "there is one host"),
        ("redis://h%2Ch2/0", "there is one host"),
        ("redis://h;h2", "letters, digits"),
        ("redis://$HOST", "letters, digits"),
        ("redis://<host>:6379", "letters, digits"),
        ("redis+sentinel://a:1,b:2", "names no service"),
        ("redis+sentinel://a:1,b:2/", "names no service"),
        ("redis+sentinel:///shop", "a host is missing"),
        ("redis+sentinel://a,,b/shop", "a host is missing"),
        ("redis+sentinel://a,b:0/shop", "from 1 to 65535"),
        ("redis+sentinel://a,b:port/shop", "cannot be understood"),
        ("redis+sentinel://a;b/shop", "letters, digits"),
        ("redis+sentinel://a/shop/one", "must be a number"),
        ("redis+sentinel://a/my%20shop", "name of the service"),
        ("redis+sentinel://u:secret@a,b/shop?sentinel_pasword=secret", "unknown option sentinel_pasword"),
        ("redis+sentinels://a/shop", "cannot be understood"),
        ("redis://a/0?service=shop", "unknown option service"),
    ],
)


@WRONG
def test_a_wrong_url_is_told_in_one_line_what_is_expected(url: str, says: str) -> None:
    with pytest.raises(BadBrokerURL, match=says) as caught:
        Endpoint.from_url(url)
    text = str(caught.value)
    assert "expected redis://" in text
    assert "\n" not in text
    assert "cret" not in text
    assert "1234" not in text


@WRONG
def test_a_wrong_url_is_refused_where_the_application_is_made(
    url: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadBrokerURL, match=says):
        App("shop", broker=url)
    with pytest.raises(
        (BadBrokerURL, Misconfigured)
    ) as caught:  # all that is wrong with `brokers` is one error
        App("shop", brokers={"mails": url})
    assert "cret" not in str(caught.value)
    if url:  # an empty variable is as good as none
        monkeypatch.setenv("CELERY5_BROKER", url)
        with pytest.raises(BadBrokerURL, match=says):
            App("shop")


@given(st.text(max_size=40))
def test_any_text_is_an_endpoint_or_a_bad_url(text: str) -> None:
    for url in (
        text,
        f"redis://{text}",
        f"unix:///{text}",
        f"rediss://h/{text}",
        f"redis+sentinel://{text}/shop",
        f"redis+sentinel://a,b/{text}",
    ):
        with suppress(BadBrokerURL):
            assert isinstance(Endpoint.from_url(url), Endpoint)


@pytest.mark.parametrize(
    "url", ["redis://u:hush@h/1", "rediss://:hush@h", "unix://u:hush@/s", "redis://h?password=hush"]
)
def test_the_password_is_shown_nowhere(url: str) -> None:
    endpoint = Endpoint.from_url(url)
    assert endpoint.password == "hush"
    assert "hush" not in repr(endpoint) + endpoint.masked_url
    assert ":***@" in endpoint.masked_url


def test_a_url_of_sentinels_is_shown_without_passwords_and_may_be_read_again() -> None:
    url = "rediss+sentinel://u:hush@a:1,[::1]/shop/3?sentinel_password=still&sentinel_username=su"
    endpoint = Endpoint.from_url(url)
    assert endpoint.masked_url == "rediss+sentinel://u:***@a:1,[::1]:26379/shop/3"
    assert "hush" not in repr(endpoint) + mask_passwords(url)
    assert "still" not in repr(endpoint) + mask_passwords(url)
    assert Endpoint.from_url(endpoint.masked_url).nodes == endpoint.nodes


def test_tls_checks_certificate_and_name_unless_told_otherwise() -> None:
    context = Endpoint.from_url("rediss://h").ssl_context()
    assert context is not None
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    context = Endpoint.from_url("rediss://h?ssl_cert_reqs=none").ssl_context()
    assert context is not None
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_NONE, False)
    assert Endpoint.from_url("redis://h").ssl_context() is None


def test_tls_files_are_read_again_only_when_they_have_changed(tmp_path: Path) -> None:
    endpoint = Endpoint.from_url(f"rediss://h?ssl_ca_certs={write_certificates(tmp_path) / 'ca.pem'}")
    context = endpoint.ssl_context()
    assert context is replace(endpoint, host="other").ssl_context()
    assert context is not replace(endpoint, ssl_check_hostname=False).ssl_context()
    write_certificates(tmp_path)
    os.utime(tmp_path / "ca.pem", ns=(1, 1))
    renewed = endpoint.ssl_context()
    assert context is not None
    assert renewed is not None
    assert context.get_ca_certs() != renewed.get_ca_certs()


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile"])
def test_tls_files_that_are_missing_are_named_as_such(option: str) -> None:
    with pytest.raises(BadBrokerURL, match="No such file or directory; check ssl_ca_certs"):
        Endpoint.from_url(f"rediss://h?{option}=/nowhere.pem").ssl_context()
