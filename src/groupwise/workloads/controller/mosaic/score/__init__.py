"""How right and how fast the mosaic model is at each setting of its knobs."""
