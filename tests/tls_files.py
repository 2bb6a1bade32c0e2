"""What tests of servers over TLS need: certificates for this machine, and a server that is built with TLS."""

from pathlib import Path

import pytest
import trustme

from celery5.broker.servers.embedded import find_binary

DEBIAN = Path("/usr/bin/redis-server")


def write_certificates(folder: Path) -> Path:
    """Write an authority (`ca.pem`), and a certificate for this machine (`own.pem`). Return the folder."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    leaf = authority.issue_cert("127.0.0.1", "localhost")
    leaf.private_key_and_cert_chain_pem.write_to_path(str(folder / "own.pem"))
    return folder


def find_tls_binary(server_binary: str | None) -> str:
    """Return the server of the tests if it is built with TLS, else Debian's; skip the test if there is none."""
    binaries = [path for path in (find_binary(server_binary), DEBIAN) if path.exists()]
    binary = next((path for path in binaries if b"SSL_CTX_new" in path.read_bytes()), None)
    if binary is None:
        pytest.skip("no server here is built with TLS")
    return str(binary)


def make_tls_options(certificates: Path) -> dict[str, str]:
    """Return the options of a server that speaks TLS with these certificates, to replicas, too."""
    return {
        "tls-cert-file": str(certificates / "own.pem"),
        "tls-key-file": str(certificates / "own.pem"),
        "tls-ca-cert-file": str(certificates / "ca.pem"),
        "tls-auth-clients": "no",
        "tls-replication": "yes",
    }
