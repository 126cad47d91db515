"""Text: the tokenizer, the text of a stream of tokens, stop strings, prompt files.

The first package on the path of a request (prompt in) and the last (text out). Nothing here knows models, drafts or devices.
"""

from foreword.text.chat_options import ChatOptions
from foreword.text.detokenizer import Detokenizer
from foreword.text.loops import LOOP_GRAM, loop_share
from foreword.text.prompts import Message, Prompt, check_messages, groups, read_prompts, spread
from foreword.text.stop import StopStrings
from foreword.text.stream import Pushed, TextStream
from foreword.text.tokenizer import Tokenizer

__all__ = [
    "LOOP_GRAM",
    "ChatOptions",
    "Detokenizer",
    "Message",
    "Prompt",
    "Pushed",
    "StopStrings",
    "TextStream",
    "Tokenizer",
    "check_messages",
    "groups",
    "loop_share",
    "read_prompts",
    "spread",
]
