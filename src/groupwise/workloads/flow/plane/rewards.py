"""How well a clip was filmed: by the camera that was asked for, and of the scene that was shown. All in closed form.

    camera    (exp(-rotation error / 0.1 rad) + exp(-translation error / 0.1)) / 2, a mean over the frames
    quality   share of the frames' pixels that the scene explains, seen from wherever the camera was found to be

Errors are those between the camera found in the clip and the one asked for, at the same frames; translations after one
scale for the path has been fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from groupwise.workloads.flow.cameras import rotation_errors, translation_errors
from groupwise.workloads.flow.plane.locate import Located, locate
from groupwise.workloads.flow.plane.scene import Scenes
from groupwise.workloads.flow.plane.words import brightness

_TOLERATED = 0.1


class PlaneJudge:
    """Rewards of TRL's signature; each clip is located once for all of them."""

    def __init__(self) -> None:
        self._last: tuple[list[Tensor], Located] | None = None

    def camera(self, prompts: Sequence[str], completions: Sequence[Tensor], **columns: Any) -> list[float]:
        rotation, translation = self._errors(prompts, completions, columns)
        return ((-rotation / _TOLERATED).exp() + (-translation / _TOLERATED).exp()).div(2).mean(1).tolist()

    def quality(self, prompts: Sequence[str], completions: Sequence[Tensor], **columns: Any) -> list[float]:
        return self._located(prompts, completions, columns).explained.clamp(min=0).mean(1).tolist()

    def rotation_error(self, prompts: Sequence[str], completions: Sequence[Tensor], **columns: Any) -> list[float]:
        return self._errors(prompts, completions, columns)[0].mean(1).tolist()

    def translation_error(self, prompts: Sequence[str], completions: Sequence[Tensor], **columns: Any) -> list[float]:
        return self._errors(prompts, completions, columns)[1].mean(1).tolist()

    def _errors(
        self, prompts: Sequence[str], clips: Sequence[Tensor], columns: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        found, wanted = self._located(prompts, clips, columns).camera, torch.stack(columns["cameras"])
        return rotation_errors(found, wanted), translation_errors(found, wanted)

    def _located(self, prompts: Sequence[str], clips: Sequence[Tensor], columns: dict[str, Any]) -> Located:
        if self._last is not None and list(map(id, self._last[0])) == list(map(id, clips)):
            return self._last[1]
        scenes = Scenes.stacked(columns["scene"])
        found = locate(scenes, torch.stack(list(clips)) / brightness(prompts).view(-1, 1, 1, 1, 1))
        self._last = (list(clips), found)
        return found
