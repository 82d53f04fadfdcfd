"""Pictures on disk for a model: cut when they are looked at, since a dataset's crops would not fit into memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from PIL import Image
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.workloads.controller.adapter import Sample
from groupwise.workloads.controller.images import open_image
from groupwise.workloads.controller.loading import LoadedModel
from groupwise.workloads.controller.samples import check_length, check_processors, words_around
from groupwise.workloads.controller.task import Question

_KEPT = 8


class Album:
    """Makes questions of files. The last few pictures stay cut."""

    def __init__(self, loaded: LoadedModel):
        self.loaded, self._statistics = loaded, check_processors(loaded)
        self.cut = lru_cache(_KEPT)(self._cut)
        self._look = lru_cache(None)(self._look_once)
        self._shapes = lru_cache(None)(self._cut_blank)

    def fault(self, file: Path) -> str:
        """Why a picture cannot be used, or nothing."""
        try:
            _, size = self._look(file)
            self._shapes(size)
        except UserError as error:
            return str(error)
        return ""

    def question(self, file: Path, text: str, answers: tuple[str, ...], *, prompt: str) -> Question:
        """The picture's content goes into the sample's name; its crops are made when they are wanted."""
        content, size = self._look(file)
        before, after = words_around(prompt.replace("{question}", text), self.loaded)
        shapes = self._shapes(size)
        check_length(len(before) + len(after), shapes, self.loaded)
        options = self.loaded.options
        sight = (dict(options.crops), dict(options.pixels), self._statistics)
        name = hashlib.blake2b(repr((content, sight, before, after)).encode(), digest_size=16).hexdigest()
        spoken = len(before) + len(after)
        tokens = {tier: spoken + self.loaded.adapter.image_tokens(blank) for tier, blank in shapes.items()}
        return Question(Sample(name, _Crops(self, file), after, before), text, answers, tokens, image=file.name)

    def _cut(self, file: Path) -> Mapping[str, Tensor]:
        return self.loaded.adapter.cut(open_image(file), self.loaded.options, self._statistics)

    def _look_once(self, file: Path) -> tuple[str, tuple[int, int]]:
        """A hash of the file, and the picture's size; a damaged file is refused."""
        size = open_image(file).size
        return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest(), size

    def _cut_blank(self, size: tuple[int, int]) -> Mapping[str, Tensor]:
        """Pictures of one size become crops of the same shapes: kept without memory behind them."""
        crops = self.loaded.adapter.cut(Image.new("RGB", size), self.loaded.options, self._statistics)
        return {tier: pixels.to("meta") for tier, pixels in crops.items()}


class _Crops(Mapping[str, Tensor]):
    """Looks like the crops of every tier, and is made of a file."""

    def __init__(self, album: Album, file: Path):
        self._album, self._file = album, file

    def __getitem__(self, tier: str) -> Tensor:
        return self._album.cut(self._file)[tier]

    def __iter__(self) -> Iterator[str]:
        return iter(self._album.loaded.options.crops)

    def __len__(self) -> int:
        return len(self._album.loaded.options.crops)
