"""Training. The package is itself callable: `groupwise.train(config)`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from groupwise.train.config import Config
    from groupwise.train.run import Summary


class _CallablePackage(ModuleType):
    def __call__(self, config: Config) -> Summary:
        """Train as the config says; the same as `groupwise train` on the command line."""
        from groupwise.train.run import train

        return train(config)


sys.modules[__name__].__class__ = _CallablePackage
