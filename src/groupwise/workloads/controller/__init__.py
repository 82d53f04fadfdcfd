"""Controllers that choose how a multimodal model spends its latency budget: knobs, executor, answers."""
