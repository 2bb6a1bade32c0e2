# jeepney: as much of its interface as celery5 uses; the library has no type information of its own.

from enum import Enum
from typing import Any

class MessageType(Enum):
    method_call = 1
    method_return = 2
    error = 3
    signal = 4

class HeaderFields(Enum):
    path = 1
    interface = 2
    member = 3
    error_name = 4
    reply_serial = 5
    destination = 6
    sender = 7
    signature = 8

class Header:
    message_type: MessageType
    serial: int
    fields: dict[HeaderFields, Any]

class Message:
    header: Header
    body: tuple[Any, ...]

class DBusAddress:
    def __init__(
        self, object_path: str, bus_name: str | None = None, interface: str | None = None
    ) -> None: ...

def new_method_call(
    remote_obj: DBusAddress, method: str, signature: str | None = None, body: tuple[Any, ...] = ()
) -> Message: ...
def new_method_return(
    parent_msg: Message, signature: str | None = None, body: tuple[Any, ...] = ()
) -> Message: ...
def new_error(
    parent_msg: Message, error_name: str, signature: str | None = None, body: tuple[Any, ...] = ()
) -> Message: ...
def new_signal(
    emitter: DBusAddress, signal: str, signature: str | None = None, body: tuple[Any, ...] = ()
) -> Message: ...
