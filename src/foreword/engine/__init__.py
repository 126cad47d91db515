"""The path, in the order it runs: admit, prefill, then rounds of propose, verify, accept, commit, and emit."""
