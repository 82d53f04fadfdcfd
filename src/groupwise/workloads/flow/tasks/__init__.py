"""Example tasks of the flow workload: the embedded sprites, and models from pipeline folders."""
