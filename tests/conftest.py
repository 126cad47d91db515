"""For every test: one thread, the same examples every time, and the CPU, unless `-m` asks for the tests of the GPU."""

import os
import signal

import pytest
import torch

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a machine with a GPU may lack it; no test of the GPU needs it
    pass
else:
    settings.register_profile("laws", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("laws")

torch.set_num_threads(1)


def asks_for_the_gpu(expression: str) -> bool:
    """Of `-m`: "gpu", "gpu and not slow"."""
    return expression.split()[:1] == ["gpu"]


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    # Triton decides while it is imported whether kernels are interpreted, and any conftest that imports transformers
    # imports it: this hook runs before those.
    config = pluginmanager.get_plugin("pytestconfig")
    if not asks_for_the_gpu(config.known_args_namespace.markexpr):
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background jobs with Ctrl-C ignored, and processes inherit that: the tests of Ctrl-C could not work.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not asks_for_the_gpu(config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Raised here, and not marked on each test: pytest's summary then has one line for all of them, with their number.
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: run `make test-gpu` where there is one")
