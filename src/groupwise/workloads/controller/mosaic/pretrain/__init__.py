"""How the mosaic model was trained."""
