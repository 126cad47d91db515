"""Settings for every test: one thread, the same examples every time, and the CPU unless `-m` selects the GPU tests."""

import gc
import os
import signal
from importlib.util import find_spec

import pytest
import torch

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a machine with a GPU may lack it; no GPU test needs it
    pass
else:
    settings.register_profile("laws", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("laws")

torch.set_num_threads(1)


def selects_gpu_tests(expression: str) -> bool:
    """Return whether the argument of `-m` selects the GPU tests: "gpu", "gpu and not slow"."""
    return expression.split()[:1] == ["gpu"]


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    # Triton decides at import whether to interpret kernels, and every conftest that imports transformers imports it. This
    # hook runs before those.
    config = pluginmanager.get_plugin("pytestconfig")
    if not selects_gpu_tests(config.known_args_namespace.markexpr):
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background jobs with Ctrl-C ignored, and child processes inherit that: tests of Ctrl-C would fail.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not selects_gpu_tests(config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if find_spec("triton"):
            from interpreter import search_once_per_kernel  # noqa: PLC0415  it imports Triton, which reads the variable above

            search_once_per_kernel()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "cross" not in config.option.markexpr:
        items[:] = [item for item in items if not item.get_closest_marker("cross")]


def pytest_collection_finish() -> None:
    # What is here by now stays: libraries, and thousands of tests. To search it for garbage takes a second or more, and the
    # benchmark does so after each of its runs.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Skip here instead of marking each test: pytest's summary then has one line with the number of skipped tests.
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: run `make test-gpu` where there is one")
    if item.get_closest_marker("ray") and not (item.config.option.markexpr == "ray" and find_spec("ray")):
        pytest.skip("starts clusters of Ray, for minutes: `make ray-test` runs it")
