"""The training room: what a target wrote becomes data, and data becomes drafters.

`distill` has the target answer prompts through the engine; `Shards` reads what it wrote; `Training` teaches a drafter.
"""

from foreword.train.distill import Progress, Recipe, distill
from foreword.train.evaluate import Trial, trials_of
from foreword.train.frequent import give_words
from foreword.train.loop import Training
from foreword.train.schedule import Settings
from foreword.train.shards import Shards
from foreword.train.texts import Sequences, about_data, open_data, split_data

__all__ = [
    "Progress",
    "Recipe",
    "Sequences",
    "Settings",
    "Shards",
    "Training",
    "Trial",
    "about_data",
    "distill",
    "give_words",
    "open_data",
    "split_data",
    "trials_of",
]
