"""The embedded model: a small multimodal mixture of experts that answers questions about mosaics of digits."""
