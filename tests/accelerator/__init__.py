"""An emulated accelerator: a torch device with the host's memory, built from C++ and registered once per process."""
