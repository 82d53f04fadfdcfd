"""A trained controller in use."""
