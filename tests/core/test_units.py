"""32GiB and bytes."""

import pytest

from groupwise.core.errors import UserError
from groupwise.core.units import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"), [("32GiB", 32 << 30), ("80 GB", 80 * 10**9), ("1.5gib", 3 << 29), ("512", 512), ("1TB", 10**12)]
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["32 gigs", "GiB", "-3GiB", "", "0GiB", "1e3GiB"])
def test_sizes_that_mean_nothing_are_refused(text):
    with pytest.raises(UserError, match=r"--device-memory is '.*': it must be"):
        parse_bytes(text, "--device-memory")
