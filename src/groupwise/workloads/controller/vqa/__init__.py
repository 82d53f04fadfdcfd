"""A controller for a model and a visual question answering dataset from disk."""
