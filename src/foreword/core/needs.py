"""Needs: what a drafter wants to see of the target, declared once as data. Nothing is discovered inside the loop.

Layer number l means: after l decoder layers (0 is the embedding).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor


@cache
def on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Fixed numbers as a tensor, sent to the device once and kept: recorded rounds read them at that address."""
    with torch.inference_mode(False):  # training may ask for the same tensor later, and could not use an inference tensor
        return torch.tensor(numbers, dtype=torch.long, device=device)


@dataclass(frozen=True)
class Graft:
    """Rows that join the pass after `layer`: row r hangs on tree node `anchor[r]`, at its position + `offset[r]`.

    A grafted row attends to the prefix, its anchor's path and the earlier grafted rows of the same anchor. Real rows never
    attend to it, and its keys and values are never committed. `onto` gets the rows of the pass [b, n, H] as they leave
    `layer`, and how many of them are real; the others were grafted before. It returns them with the new ones appended
    [b, n + R, H]. Nodes may carry different numbers of rows, or none. Grafts join rounds only: a prompt pass has none.
    """

    layer: int
    anchor: tuple[int, ...]
    offset: tuple[int, ...]
    onto: Callable[[Tensor, int], Tensor]

    @staticmethod
    def of(layer: int, anchor: tuple[int, ...], offset: tuple[int, ...], make: Callable[[Tensor, Tensor], Tensor]) -> Graft:
        """`make` gets the real rows [b, N, H] and the rows grafted so far [b, R', H], and gives the new ones [b, R, H]."""

        def onto(hidden: Tensor, real: int) -> Tensor:
            return torch.cat([hidden, make(hidden[:, :real], hidden[:, real:])], dim=1)

        return Graft(layer, anchor, offset, onto)

    def __post_init__(self) -> None:
        if len(self.anchor) != len(self.offset):
            raise ValueError(f"a graft needs one offset per anchor, got {len(self.offset)} for {len(self.anchor)}")

    @property
    def rows(self) -> int:
        return len(self.anchor)


@dataclass(frozen=True)
class Join:
    """A graft for training: rows that join whole sequences after `layer`, one per anchor, `offset` places after it.

    A row attends to its sequence up to the anchor, to itself, and to the rows that the earlier joins `sees` added at the
    same anchor. Rows of the sequence never attend to it. `make` gets the sequence's rows at the anchors [b, A, H] as they
    leave `layer` and what the earlier joins have become, each [b, A, H], and gives the new rows [b, A, H].
    """

    layer: int
    offset: int
    make: Callable[[Tensor, Sequence[Tensor]], Tensor]
    sees: tuple[int, ...] = ()


class Joined(NamedTuple):
    """Sequences and the rows that joined them, as they leave a layer."""

    layer: int
    sequences: Tensor  # [b, n, H]
    rows: tuple[Tensor, ...]  # of each join so far [b, A, H]


@dataclass(frozen=True)
class Needs:
    """What a drafter wants of each pass. `prompt` asks for the prompt's rows too: none, all, or the last of each chunk, so
    that the row before the root is read last. `follower` says that the drafter keeps a row together with the token after it.
    Then a reused slot's last row is read again, since another token may follow it now. `deferred` says that it reads the
    rows of a round in the next round. Then those of a sequence's last round are read again when its slot is reused.
    `scratch` is how many rows the drafter itself runs through the target's cache before they are verified, if these are more
    than the rows of its trees."""

    hidden: bool = False
    logits: bool = False
    taps: tuple[int, ...] = ()
    grafts: tuple[Graft, ...] = ()
    prompt: Literal["none", "last", "all"] = "none"
    follower: bool = False
    deferred: bool = False
    scratch: int = 0

    def __post_init__(self) -> None:
        layers = [graft.layer for graft in self.grafts]
        if layers != sorted(layers):
            raise ValueError(f"grafts join in the order of their layers, got layers {layers}")

    @property
    def grafted_rows(self) -> int:
        return sum(graft.rows for graft in self.grafts)


HalfKind = Literal["attention", "mlp"]
Half = tuple[HalfKind, int]


@dataclass(frozen=True)
class Skip:
    """Half-layers to leave out of a pass, by layer index."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    @staticmethod
    def of(attention: tuple[int, ...] = (), mlp: tuple[int, ...] = ()) -> Skip:
        return Skip(frozenset(attention), frozenset(mlp))

    @staticmethod
    def of_halves(halves: Iterable[Half]) -> Skip:
        listed = list(halves)
        return Skip(*(frozenset(layer for kind, layer in listed if kind == one) for one in ("attention", "mlp")))

    def __or__(self, other: Skip) -> Skip:
        return Skip(self.attention | other.attention, self.mlp | other.mlp)

    @property
    def halves(self) -> list[Half]:
        """Each half-layer as its kind and its layer, attention first."""
        both: tuple[tuple[HalfKind, frozenset[int]], ...] = ("attention", self.attention), ("mlp", self.mlp)
        return [(kind, layer) for kind, layers in both for layer in sorted(layers)]
