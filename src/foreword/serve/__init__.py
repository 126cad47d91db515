"""Serving: an engine in a process of its own, its client for event loops, and an OpenAI-compatible server on top of it."""
