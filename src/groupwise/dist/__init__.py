"""The only folder that knows of torch.distributed, Accelerate and device names."""
