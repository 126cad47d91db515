"""For every test: one thread, and the same examples every time."""

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

settings.register_profile("laws", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("laws")
