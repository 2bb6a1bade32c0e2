"""Boxes: their declaration, and the frames that a worker and its boxes exchange."""
