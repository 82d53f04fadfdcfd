"""The HTML page that shows a run: one file, no network, no scripts."""
