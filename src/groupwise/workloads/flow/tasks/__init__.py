"""Example tasks of the flow workload: the embedded plane, and models from pipeline folders."""
