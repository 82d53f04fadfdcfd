"""Pure functions and frozen records: no rank, no device, no logging."""
