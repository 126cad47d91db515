"""Where weights come from: the default model, folders, hub ids, GGUF files; storage and fingerprints."""
