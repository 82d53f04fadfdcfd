"""How gradients are sent where each rank holds all of them. No torch: the memory plan counts the buffer, too."""

BUCKET_NUMEL = 1 << 22
"""Elements per all-reduce when gradients are summed: small tensors share one bucket."""
