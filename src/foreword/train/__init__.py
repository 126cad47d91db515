"""The training room: what a target wrote becomes data, and data becomes drafters.

`distill` has the target answer prompts through the engine; `Shards` reads what it wrote; `Training` teaches a drafter.
"""

from foreword.train.distill import DistillProgress, Recipe, distill
from foreword.train.evaluate import HeldOutPrompt, trials_of
from foreword.train.frequent import give_words
from foreword.train.loop import Training
from foreword.train.schedule import TrainingSettings, batch_for
from foreword.train.shards import Shards
from foreword.train.texts import Sequences, about_data, open_data, share_apart, split_data

__all__ = [
    "DistillProgress",
    "Recipe",
    "Sequences",
    "TrainingSettings",
    "Shards",
    "Training",
    "HeldOutPrompt",
    "about_data",
    "batch_for",
    "distill",
    "give_words",
    "open_data",
    "share_apart",
    "split_data",
    "trials_of",
]
