"""`python -m groupwise`, for `torchrun -m` and `accelerate launch -m`."""

import os
import sys
import time

try:
    from groupwise.cli.main import main
except KeyboardInterrupt:  # nothing has begun
    sys.exit(130)

_FIRST_WORD_S = 3.0
"""The launcher ends all ranks when one has failed: the main rank, which speaks for all, gets so long to say why."""

if __name__ == "__main__":
    code = main()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from groupwise.dist.comm import exit_now

        if code and os.environ.get("RANK", "0") != "0":
            time.sleep(_FIRST_WORD_S)
        exit_now(code)
    sys.exit(code)
