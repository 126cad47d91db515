"""The target as we walk it: a transformers causal language model, its cache and its attention."""
