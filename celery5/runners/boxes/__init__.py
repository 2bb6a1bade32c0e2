"""Boxes: processes of their own for tasks that ask for isolation."""
