"""The embedded default: a small language model that does sums in a dialogue, its tokenizer, task and pretraining."""
