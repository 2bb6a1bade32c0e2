"""Doctor: all checks of an application and of where it runs."""
