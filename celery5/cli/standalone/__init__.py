"""Commands that are not made from operations: they run a process, draw a screen, or work without an application."""
