"""Where weights come from: the default model, folders, hub ids, GGUF files; downloads and storage."""
