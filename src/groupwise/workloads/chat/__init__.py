"""Chat: a prompt is a condition, a token a decision."""
