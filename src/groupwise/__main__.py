"""`python -m groupwise`, for `torchrun -m` and `accelerate launch -m`."""

import os
import sys

try:
    from groupwise.cli.main import main
except KeyboardInterrupt:  # nothing has begun
    sys.exit(130)

if __name__ == "__main__":
    code = main()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from groupwise.dist.comm import exit_now

        exit_now(code)
    sys.exit(code)
