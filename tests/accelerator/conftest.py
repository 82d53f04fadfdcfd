"""The tests on the device are collected only in a process that has one."""

import os

collect_ignore_glob = [] if os.environ.get("GROUPWISE_TEST_DEVICE") else ["on_device"]
