"""Change what configures an application."""
