"""The protocol between producers and the Publisher daemon."""
