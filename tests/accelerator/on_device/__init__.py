"""Tests that run on a device other than the CPU, in a process of their own (see `accelerator.test_accelerator`)."""
