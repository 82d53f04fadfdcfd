"""Visual question answering on the user's own data."""
