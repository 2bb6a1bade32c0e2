"""The services that take control commands and carry them out."""
