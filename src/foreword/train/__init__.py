"""Training: make data from a target's own output, and train drafters on it.

`distill` lets the target answer prompts through the engine. `Shards` reads what it generated. `Training` trains a drafter,
and `LoopedTraining` makes a looped model.
"""

from foreword.train.distill import DistillProgress, Recipe, distill
from foreword.train.evaluate import HeldOutPrompt, held_out_prompts
from foreword.train.frequent_tokens import choose_draft_vocabulary
from foreword.train.loop import Training, TrainingLoop
from foreword.train.looped import LoopedOptions, LoopedTraining
from foreword.train.schedule import TrainingSettings, batch_for
from foreword.train.sequences import Sequences, all_sequences, describe_data, held_out_share, open_data, split_data
from foreword.train.shards import Shards

__all__ = [
    "DistillProgress",
    "LoopedOptions",
    "LoopedTraining",
    "Recipe",
    "Sequences",
    "TrainingSettings",
    "Shards",
    "Training",
    "TrainingLoop",
    "HeldOutPrompt",
    "all_sequences",
    "batch_for",
    "choose_draft_vocabulary",
    "describe_data",
    "distill",
    "held_out_prompts",
    "held_out_share",
    "open_data",
    "split_data",
]
