"""Boxes: processes of their own for tasks that need isolation."""
