"""The target: a transformers causal language model, which we run layer by layer with our own cache and attention."""
