"""Speed up a transformers model that is already in memory. Its own `generate` keeps working."""

from transformers import AutoModelForCausalLM, AutoTokenizer

import foreword

folder = foreword.default_model()
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)

llm = foreword.wrap(model, tokenizer, method="prompt_lookup")
out = llm.generate("Repeat after me: the quick brown fox jumps over the lazy dog.", max_new_tokens=32)
print(out.text)
print(f"{out.stats.tokens_per_round:.2f} tokens per round")
