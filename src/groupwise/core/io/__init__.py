"""What comes from outside: files with limits, JSON of known types, imports by name, functions of the user."""
