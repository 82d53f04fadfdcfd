"""The controlled model: knobs, loading, inputs, execution."""
