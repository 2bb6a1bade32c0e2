from typing import Any

class LuaRuntime:
    def __init__(
        self,
        encoding: str | None = ...,
        *,
        unpack_returned_tuples: bool = ...,
        register_eval: bool = ...,
        register_builtins: bool = ...,
    ) -> None: ...
    def execute(self, lua_code: bytes, *args: Any) -> Any: ...
    def table_from(self, *args: Any) -> Any: ...

def lua_type(obj: object) -> str | None: ...
