"""Find the folder of the keys that sign commands, by the setting `keys`."""

import os
from collections.abc import Mapping
from pathlib import Path

from celery5.errors import Misconfigured


def get_key_folder(app: str, setting: str, environ: Mapping[str, str]) -> Path:
    """Return the folder of an application's keys: the setting `keys`, else a folder in the user's state folder.

    All processes of a user on a host share the latter.

    Raises:
        Misconfigured: The user has no home folder, or the setting is no name of a folder.
    """
    if setting:
        if Path(setting).name in ("", ".."):
            raise Misconfigured(f"keys is {setting!r}: name a folder that has only keys")
        try:
            return Path(setting).expanduser()
        except RuntimeError:
            raise Misconfigured(f"keys is {setting!r}: there is no such user, or no home folder") from None
    state = environ.get("XDG_STATE_HOME", "")
    try:
        root = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    except RuntimeError:
        raise Misconfigured("this user has no home folder to keep keys in: set CELERY5_KEYS") from None
    return root / "celery5" / "keys" / app.replace("/", "_")
