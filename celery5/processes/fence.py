"""Fence: a process that a Controller has started does not begin when another Controller leads by now.

Floor: processes. Reads: CELERY5_CONTROLLER_EPOCH, which it takes out of the environment; who leads. Writes: nothing.

A Controller may be frozen, or cut off, between knowing that it leads and starting a process. When it goes on, the
process is there, and is refused here: at what it would act upon, not at who believed to lead.
"""

import os

from celery5.app import App
from celery5.broker import leading
from celery5.errors import BrokerUnavailable, Misconfigured, Superseded
from celery5.protocol.leadership import EPOCH_VARIABLE, is_superseded


def check_controller_epoch(app: App, *, without_redis: bool = False) -> bool:
    """Whether a Controller has started this process. Raises Superseded when another one leads by now; BrokerUnavailable
    when nobody knows, unless it may begin `without_redis`.

    The variable is for this process alone: what a job starts is no affair of the Controller's.
    """
    said = os.environ.pop(EPOCH_VARIABLE, "")
    if not said:
        return False
    if not (said.isascii() and said.isdigit()):
        raise Misconfigured(
            f"{EPOCH_VARIABLE} is {said!r}: it is a number, which a Controller gives what it starts"
        )
    try:
        record = app.perform(leading.get_leader(app.keys), instead="aperform")
    except BrokerUnavailable:
        if not without_redis:
            raise
    else:
        if is_superseded(int(said), record):
            leader = f"{record.leader} leads" if record.leader else "another one led"
            raise Superseded(
                f"the Controller that started this process leads no more ({leader} in epoch {record.epoch}, "
                f"this is of {said}): it does not begin"
            )
    finally:
        app.close()  # processes are forked from here on
    return True
