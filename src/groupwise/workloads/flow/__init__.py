"""GRPO for flow-matching image and video models: a decision is a denoising step."""
