"""One application of a looped model's group of layers, for tokens that have been through it different numbers of times.

In: rows at any positions and repeats. Out: the same rows one repeat further. Each row reads and writes the keys and values
of its own repeat. So a slot of the cache is divided into one virtual slot per repeat, and to attention each row is a
sequence of its own: the rows before its position, and one new row.
"""

from __future__ import annotations

from torch import Tensor

from foreword.core.state import Batch
from foreword.model import attention
from foreword.model.model import Model
from foreword.model.stack import Rows, Stack


class LayerGroup:
    """The layers of one repeat, on the cache that the target has now."""

    def __init__(self, target: Model) -> None:
        self.target, count = target, target.layers // target.repeats
        whole = target.layer_stack
        self.stack = Stack(whole.model, whole.family, whole.layers[:count])
        self.stack.cache, self.stack.rotary_tables = target.cache.of_group(count), whole.rotary_tables
        self.slots_per_repeat = count * target.cache.slots

    def __call__(self, batch: Batch, hidden: Tensor, position: Tensor, slots: Tensor) -> Tensor:
        """Run rows [b, n, H] through the group. position [b, n]: at most n - 1 after the committed rows. slots [b, n]: the
        virtual slot of each row: that of its sequence, and `slots_per_repeat` more for each time that the row has been
        through. All rows before a position must have been through more often."""
        attention.route(self.target.hf)
        rows = hidden.shape[1]
        each = Batch(slots.flatten(), batch.ids * rows, batch.span + rows - 1, changes=True)
        walked = self.stack.walk(hidden.flatten(0, 1).unsqueeze(1), Rows.chain_after(position.flatten(), 1, each))
        return walked.hidden.view_as(hidden)
