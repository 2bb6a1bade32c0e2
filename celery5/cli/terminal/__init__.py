"""What all commands share: flags, loading the application, errors, output."""
