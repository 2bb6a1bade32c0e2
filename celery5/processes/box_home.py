"""Box home: what a worker tells its Python boxes of its application.

Floor: processes. Reads: the application. Writes: nothing.
"""

import os
import sys
from typing import TYPE_CHECKING

import msgspec

from celery5.app import App
from celery5.protocol.names import resolve_module_name

if TYPE_CHECKING:
    from celery5.protocol.frames import BoxHome


def make_box_home(app: App) -> "BoxHome":
    """Where a box finds the tasks of `app`, and with which settings: those of the worker, however it got them."""
    from celery5.protocol.frames import BoxHome

    path = tuple(os.path.abspath(each) for each in sys.path)  # '' is the working directory
    return BoxHome(resolve_module_name(app.module), app.name, path, msgspec.to_builtins(app.settings))
