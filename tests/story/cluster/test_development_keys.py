"""Development keys: a development controller makes the keys that its application's commands are signed with (C90)."""

import json
import stat
from pathlib import Path

import pytest

from celery5.commands.keyring import Keyring
from tests.story.cli.commands import Serving, celery5

DEVELOPMENT = ("-A", "shop", "controller", "start", "--development")


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(
        'from celery5 import App\napp = App("shop")\n@app.task\ndef add(a: int) -> int:\n    return a\n'
    )
    return tmp_path


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def test_development_keys_are_private_and_accepted_by_workers(shop: Path) -> None:
    state = {"XDG_STATE_HOME": str(shop / "state")}
    folder = shop / "state" / "celery5" / "keys" / "shop"
    with Serving(*DEVELOPMENT, cwd=shop, env=state) as controller:
        controller.ready()
        assert f"commands are signed with new keys, in {folder}\n" in controller.err
        assert (mode(folder), mode(folder / "mine.pem"), mode(folder / "ca.pem")) == (0o700, 0o600, 0o600)
        own = controller.err.split("'")[1]
        before = (folder / "mine.pem").read_bytes()
        pinged = celery5(
            "-A", "shop", "worker", "ping", "--json", cwd=shop, env={**state, "CELERY5_BROKER": own}
        )
        assert [entry["ok"] for entry in json.loads(pinged.out)] == [True], pinged
        # Another's keys are not believed.
        other = {"XDG_STATE_HOME": str(shop / "other"), "CELERY5_BROKER": own}
        refused = celery5("-A", "shop", "worker", "ping", "--json", cwd=shop, env=other)
        assert [refusal["reason"] for refusal in json.loads(refused.out)] == ["unknown-issuer"]
        shown = json.loads(celery5("-A", "shop", "keys", "show", "--json", cwd=shop, env=state).out)
        assert {certificate["role"] for certificate in shown["certificates"]} == {
            "mine",
            "authority",
            "trusted",
        }
    with Serving(*DEVELOPMENT, cwd=shop, env=state) as controller:  # those that are there stay
        controller.ready()
        assert "new keys" not in controller.err
    assert (folder / "mine.pem").read_bytes() == before


def test_it_uses_the_keys_that_it_is_given(shop: Path) -> None:
    keys = Keyring(shop / "given", owner="shop")
    keys.renew()
    before = (shop / "given" / "mine.pem").read_bytes()
    state = {"XDG_STATE_HOME": str(shop / "state")}
    with Serving(*DEVELOPMENT, "--keys", shop / "given", cwd=shop, env=state) as controller:
        controller.ready()
        assert "new keys" not in controller.err
    assert (shop / "given" / "mine.pem").read_bytes() == before
    assert not (shop / "state").exists()


@pytest.mark.parametrize("flag", ["--no-inbox-signatures", "--no-inbox"])
def test_it_makes_none_when_commands_are_not_signed(shop: Path, flag: str) -> None:
    with Serving(*DEVELOPMENT, flag, cwd=shop, env={"XDG_STATE_HOME": str(shop / "state")}) as controller:
        controller.ready()
    assert not (shop / "state").exists()


def test_it_goes_on_without_keys_that_cannot_be_made(shop: Path) -> None:
    (shop / "open").mkdir(mode=0o755)
    (shop / "open").chmod(0o755)
    with Serving(*DEVELOPMENT, "--keys", shop / "open", cwd=shop) as controller:
        controller.ready()
        assert "Warning: commands cannot be signed: others may enter" in controller.err
