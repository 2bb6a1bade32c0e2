"""Broker: the one room that knows Redis: keys, calls, Lua, and connections of three colours."""
