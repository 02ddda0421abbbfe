"""hetspec."""
