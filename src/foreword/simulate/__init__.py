"""The simulator: what a fleet of servers does under a load, computed from measured costs. It needs no GPU."""
