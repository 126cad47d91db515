"""The two tiers of the GPU tests: `make test-gpu` runs the quick one, `pytest -m "gpu and slow"` the rest.

Triton compiles a kernel once per combination of sizes, and this takes most of the time. The quick tier has a few sizes of
every kernel. A case in `slow(..)` adds sizes, but no kernel.
"""

from functools import partial

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)
