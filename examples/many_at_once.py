"""Several prompts in one batch, each with its own seed; the output of one does not depend on the others."""

import foreword

llm = foreword.load(slots=3)
prompts = ["Name a colour.", "Name an animal.", "Name a city."]
for prompt, result in zip(prompts, llm.generate(prompts, max_new_tokens=16, temperature=0.8, seed=1), strict=True):
    print(f"{prompt} {result.text!r} ({result.stats.tokens_per_round:.2f} tokens per round)")

samples = llm.generate("Name a colour.", n=3, max_new_tokens=16, temperature=0.8, seed=1)
print([sample.text for sample in samples])
