"""For every test: one thread, the same examples every time, and the CPU, unless `-m gpu` asks for the tests of the GPU."""

import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

settings.register_profile("laws", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("laws")


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    # Triton decides while it is imported whether kernels are interpreted, and any conftest that imports transformers
    # imports it: this hook runs before those.
    config = pluginmanager.get_plugin("pytestconfig")
    if config.known_args_namespace.markexpr != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background jobs with Ctrl-C ignored, and processes inherit that: the tests of Ctrl-C could not work.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device: run `pytest -m gpu` where there is one")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
