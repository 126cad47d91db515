"""The two tiers of the tests on a GPU: `make test-gpu` runs the quick one, `pytest -m "gpu and slow"` the rest.

A Triton kernel is compiled once for each combination of its sizes, and that takes most of the time. The quick tier has a few
sizes of every kernel. A case that stands in `slow(..)` adds sizes, and no kernel.
"""

from functools import partial

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)
