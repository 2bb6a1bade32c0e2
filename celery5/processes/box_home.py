"""Box home: what a worker tells its Python boxes of its application.

Floor: processes. Reads: the application. Writes: nothing.
"""

import os
import sys
from typing import TYPE_CHECKING

import msgspec

from celery5.app import App
from celery5.protocol.names import module_named

if TYPE_CHECKING:
    from celery5.protocol.frames import Home


def home_of(app: App) -> "Home":
    """Where a box finds the tasks of `app`, and with which settings: those of the worker, however it got them."""
    from celery5.protocol.frames import Home

    path = tuple(os.path.abspath(each) for each in sys.path)  # '' is the working directory
    return Home(module_named(app.module), app.name, path, msgspec.to_builtins(app.settings))
