"""`python -m groupwise`, which `accelerate launch -m` and `torchrun -m` use."""

import sys

from groupwise.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
