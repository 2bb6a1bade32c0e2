"""SSHD: an OpenSSH server of the tests' own, on a free port of this machine, with keys and a systemd to go with it."""

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from celery5.services.controller.ssh_line import SSHConnection

SEARCHED = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
HERE = Path(__file__).resolve().parent


@dataclass
class OtherHost:
    """A host at the other end of an ssh: `program` is an ssh that knows it as `web2`, `runtime` its runtime folder."""

    folder: Path
    port: int
    program: tuple[str, ...]

    daemon: "subprocess.Popen[bytes] | None" = None

    @property
    def runtime(self) -> Path:
        return self.folder / "runtime"

    @property
    def home(self) -> Path:
        """Where members run."""
        return self.folder / "home"

    def line(self) -> SSHConnection:
        """The way there."""
        return SSHConnection(name="web2", destination="web2", program=self.program)

    def up(self) -> None:
        """Let people in. It is there when this returns."""
        sshd = shutil.which("sshd", path=SEARCHED)
        assert sshd is not None
        with (self.folder / "sshd.log").open("ab") as log:
            self.daemon = subprocess.Popen(
                [sshd, "-D", "-e", "-f", str(self.folder / "sshd_config")],
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        limit = time.monotonic() + 20
        while time.monotonic() < limit:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.02)
        raise AssertionError((self.folder / "sshd.log").read_text())

    def down(self) -> None:
        """The network is gone: nobody is let in, and whoever was is cut off."""
        assert self.daemon is not None
        self.daemon.terminate()
        self.daemon.wait(10)
        for process in self.processes("sshd:") + self.processes(str(self.folder / "sshd_config")):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def processes(self, what: str) -> list[int]:
        """Those of this host whose command line says that, or, of sshd itself, who descend from our daemon."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if not entry.name.isdigit() or what not in line or int(entry.name) == os.getpid():
                    continue
                if what != "sshd:" or self._is_ours(entry):
                    found.append(int(entry.name))
        return found

    def _is_ours(self, entry: Path) -> bool:
        """Each session of sshd has a socket at our port; and the session leader of the daemon stays its own."""
        inodes = {os.readlink(path) for path in (entry / "fd").iterdir()}
        port = f":{self.port:04X}"
        ours = {
            f"socket:[{line.split()[9]}]"
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
            if line.split()[1].endswith(port)
        }
        return bool(inodes & ours)

    def units(self) -> dict[str, dict[str, str]]:
        """How the units there are, by name."""
        return {
            path.name.removesuffix(".json"): json.loads(path.read_text())
            for path in (self.runtime / "there").glob("*.json")
        }

    def clear(self) -> None:
        """End what units still run."""
        for unit in self.units().values():
            for name in ("SupervisorPID", "MainPID"):
                with suppress(ProcessLookupError):
                    if int(unit.get(name, "0")):
                        os.kill(int(unit[name]), signal.SIGKILL)


def why_not() -> str:
    """Why there can be no such host here; '' if it can."""
    for program in ("ssh", "ssh-keygen", "sshd"):
        if shutil.which(program, path=SEARCHED) is None:
            return f"there is no {program} on this machine"
    if os.getuid() == 0 and not Path("/run/sshd").is_dir():
        with suppress(OSError):
            Path("/run/sshd").mkdir(mode=0o755)  # an sshd of root's wants it; its service would have made it
        if not Path("/run/sshd").is_dir():
            return "sshd has no folder /run/sshd to keep its privileges apart in"
    return ""


@contextmanager
def other_host(folder: Path) -> Iterator[OtherHost]:
    """One that is up. Its systemd knows no unit yet."""
    for name in ("bin", "home", "runtime"):
        (folder / name).mkdir(mode=0o700)
    for name in ("host", "user"):
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(key, check=True, timeout=20)
    for name in ("systemctl", "loginctl"):
        there = folder / "bin" / name
        there.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {HERE / "systemctl_there.py"} {name} "$@"\n')
        there.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    user = pwd.getpwuid(os.getuid()).pw_name
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nPidFile none\n"
        "UsePAM no\nStrictModes no\nPermitRootLogin yes\nPasswordAuthentication no\nPrintMotd no\n"
        f"SetEnv PATH={folder}/bin:/usr/bin:/bin HOME={folder}/home XDG_RUNTIME_DIR={folder}/runtime\n"
    )
    known(folder, port, (folder / "host.pub").read_text())
    (folder / "ssh_config").write_text(
        f"Host web2\nHostName 127.0.0.1\nPort {port}\nUser {user}\nIdentityFile {folder}/user\nIdentitiesOnly yes\n"
        f"UserKnownHostsFile {folder}/known_hosts\nGlobalKnownHostsFile /dev/null\n"
    )
    host = OtherHost(folder, port, ("ssh", "-F", str(folder / "ssh_config")))
    host.up()
    try:
        yield host
    finally:
        host.down()
        host.clear()


def known(folder: Path, port: int, key: str) -> None:
    """Pin this key of the host."""
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {key}" if key else "")
