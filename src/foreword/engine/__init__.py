"""The path of a request, in the order it runs: admit, prefill, then rounds (lockstep.py), and emit."""
