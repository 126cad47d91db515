"""The training room: what a target wrote becomes data, and data becomes drafters.

`distill` has the target answer prompts through the engine; `Shards` reads what it wrote.
"""

from foreword.train.distill import Progress, Recipe, distill
from foreword.train.shards import Batch, Shards

__all__ = ["Batch", "Progress", "Recipe", "Shards", "distill"]
