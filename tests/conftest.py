"""For every test: one thread, fixed examples, and `tests` on the path, so that `import doubles` works anywhere."""

import sys
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)

settings.register_profile("laws", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("laws")
