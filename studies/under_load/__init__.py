"""The parts of the load test of a server (studies/load_test.py), which the tests use too, with fewer requests."""
