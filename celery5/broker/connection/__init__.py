"""Connections to the broker: the handshake, request and reply, reconnecting."""
