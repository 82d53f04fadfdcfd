"""Ranks, devices, process settings and trackers: the only folder that imports torch.distributed or accelerate."""
