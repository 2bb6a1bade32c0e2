"""Broker: the one layer that knows Redis: keys, calls, Lua scripts, and connections of three colours."""
