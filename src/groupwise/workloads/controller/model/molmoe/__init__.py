"""MolmoE as it is published: its configuration, tensors, crops and modules, on transformers' OLMoE and CLIP classes."""
