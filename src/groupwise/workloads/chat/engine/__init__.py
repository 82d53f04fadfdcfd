"""Generation and scoring with shared prompts."""
