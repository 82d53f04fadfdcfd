"""The knobs that a model can offer when nobody has said more than its name."""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.workloads.controller.adapter import Adapter, dense_blocks, full_top_k
from groupwise.workloads.controller.knobs import KnobOptions

_LATEST_INSERTION_POSITION = 5
# Measured on MolmoE, the model with 16 blocks in the field.
_REMOVED_FIRST_OF_16 = (4, 13, 10, 2)


def default_options(adapter: Adapter, drop_order: Sequence[int] | None = None) -> KnobOptions:
    """Up to a quarter of the blocks may go, top-k down to half, the second choice after block 1 to 5, and the family's
    tiers. Without a measured `drop_order` it is guessed.
    """
    total, top_k = len(adapter.blocks), full_top_k(adapter)
    latest = max(1, min(_LATEST_INSERTION_POSITION, total - 1 - total // 4))
    order = tuple(guessed_drop_order(total) if drop_order is None else drop_order)
    tiers = adapter.tiers()
    return KnobOptions(
        crops=tiers["crops"],
        total_blocks=total,
        full_top_k=top_k,
        drop_order=order,
        insertion_positions=tuple(range(1, latest + 1)),
        most_dropped=min(total // 4, sum(block >= latest for block in order)),
        smallest_top_k=(top_k + 1) // 2,
        dense_blocks=dense_blocks(adapter) if top_k else (),
        pixels=tiers.get("pixels", {}),
    )


def guessed_drop_order(total_blocks: int) -> list[int]:
    """A guess, to be replaced by a measurement on the model itself: what lies around two thirds of the depth goes
    first, the first and the last block never. With 16 blocks, MolmoE's measured order comes before the rest.
    """
    known = _REMOVED_FIRST_OF_16 if total_blocks == 16 else ()
    rest = [block for block in range(1, total_blocks - 1) if block not in known]
    return [*known, *sorted(rest, key=lambda block: abs(block - 2 * total_blocks / 3))]
