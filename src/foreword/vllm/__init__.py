"""Our drafters inside vLLM: proposer classes that its method `custom_class` loads, here without importing vLLM itself.

vLLM makes one of them with its config, shows it the target once (`load_model`), and asks it for drafts after every step
(`propose`). Drafts are chains, and vLLM verifies them by its own rule. The page docs/vllm.md says how to use them.
"""

from foreword.vllm.proposers import Heads, Lookup, Recycling

__all__ = ["Heads", "Lookup", "Recycling"]
