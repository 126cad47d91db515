"""Small real objects for the tests. Import them from here: `from doubles import target, truth, Liar`.

`models`: tiny random models. `reference`: what plain decoding must generate. `text`: tokenizers. `engines`: requests and
engines. `states`, `trees`, `attention`: parts of a round. `methods`: every method with small options. `drafters`: drafters
that lie or know the truth. `recording`: a drafter that records calls. `training`: a trainable drafter and its data.
"""

from doubles.attention import AttentionCase
from doubles.drafters import LastHidden, Liar, Oracle, Plan, Playback, continuation
from doubles.engines import SAMPLINGS, engine, in_turns, prompts, requests, rerunning, run_to_end, written
from doubles.methods import (
    DRAFTING,
    IN_PROCESS,
    OPTIONS,
    TRAINABLE,
    TRAINED,
    WITHOUT_WEIGHTS,
    drafter,
    family_for,
    target_for,
    with_random_weights,
)
from doubles.models import (
    BY_LAW,
    CONTEXT,
    END,
    EVERY_FAMILY,
    FAMILIES,
    POISON,
    RUN_ONCE,
    STOCK_ATTENTION,
    VOCABULARY,
    WIDENABLE_KINDS,
    fresh,
    poisoned_model,
    target,
    tiny,
    widened_pair,
)
from doubles.ranks import one_rank
from doubles.recording import Recorder, Seen, check_yield, drafts_of
from doubles.reference import GRAMMAR_COMPILER, forget_truth, full_sequence, hf_cache, hf_hidden, hf_logits, hf_window, truth
from doubles.states import prefilled, sequence_of, sequences_of, state_of
from doubles.text import (
    TOOL_TEMPLATE,
    byte_tokenizer,
    json_ids,
    json_tokenizer,
    talking_model,
    tokenizer,
    with_template,
)
from doubles.training import SequenceList, TwoHeads, vocabulary_of
from doubles.trees import chain, path_to, paths_of, random_tree

__all__ = [
    "BY_LAW",
    "forget_truth",
    "AttentionCase",
    "CONTEXT",
    "DRAFTING",
    "END",
    "EVERY_FAMILY",
    "RUN_ONCE",
    "FAMILIES",
    "GRAMMAR_COMPILER",
    "IN_PROCESS",
    "LastHidden",
    "Liar",
    "OPTIONS",
    "Oracle",
    "POISON",
    "Plan",
    "Playback",
    "Recorder",
    "SAMPLINGS",
    "STOCK_ATTENTION",
    "Seen",
    "SequenceList",
    "TOOL_TEMPLATE",
    "TRAINABLE",
    "TRAINED",
    "TwoHeads",
    "VOCABULARY",
    "WIDENABLE_KINDS",
    "WITHOUT_WEIGHTS",
    "byte_tokenizer",
    "chain",
    "check_yield",
    "continuation",
    "drafter",
    "drafts_of",
    "engine",
    "family_for",
    "fresh",
    "full_sequence",
    "hf_cache",
    "hf_hidden",
    "hf_logits",
    "hf_window",
    "in_turns",
    "json_ids",
    "json_tokenizer",
    "path_to",
    "paths_of",
    "poisoned_model",
    "prefilled",
    "one_rank",
    "prompts",
    "random_tree",
    "requests",
    "rerunning",
    "run_to_end",
    "sequence_of",
    "sequences_of",
    "state_of",
    "talking_model",
    "target",
    "target_for",
    "tiny",
    "tokenizer",
    "truth",
    "vocabulary_of",
    "widened_pair",
    "with_random_weights",
    "with_template",
    "written",
]
