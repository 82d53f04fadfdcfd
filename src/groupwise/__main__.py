"""`python -m groupwise`, which `accelerate launch -m` and `torchrun -m` use."""

import os
import sys

from groupwise.cli.main import main

if __name__ == "__main__":
    code = main()
    if code == 0 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from groupwise.dist.comm import exit_now

        exit_now()
    sys.exit(code)
