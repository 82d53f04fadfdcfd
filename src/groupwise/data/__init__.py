"""Reading rows of data."""
