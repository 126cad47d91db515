"""What differs between a GPU and a CPU, by purpose. Outside `ops` few files compare
device types; tests/rooms lists them.

Each function takes a device and answers one question of the engine, the model or a method.
"""

from __future__ import annotations

import torch

HALF = (torch.bfloat16, torch.float16)


def fixes_shapes(device: torch.device) -> bool:
    """Return whether a pass always has the number of rows it was bound with, and masks unused ones. A GPU replays captured
    rounds, which have fixed shapes, and more rows cost it little. On a CPU every row costs, so unused rows are cut off."""
    return device.type == "cuda"


def reads_late(device: torch.device) -> bool:
    """Return whether the host reads a round while the next one runs. On a CPU nothing runs meanwhile."""
    return device.type == "cuda"


def replays_graphs(device: torch.device) -> bool:
    """Return whether launches can be recorded as a graph and replayed."""
    return device.type == "cuda"


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that completes when the device has done all work queued so far; None if there is nothing to wait
    for."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def prefill_chunk(device: torch.device) -> int:
    """Return how many prompt tokens of a sequence one pass reads."""
    return 1024 if device.type == "cuda" else 256


def joins_prompts(device: torch.device) -> bool:
    """Return whether several prompts are read in one pass. The rows of one prompt keep a CPU busy."""
    return device.type == "cuda"


def captures(device: torch.device) -> bool:
    """Return whether calls are captured once and replayed, as CUDA graphs. A captured call reads its slots from a buffer."""
    return device.type == "cuda"


def is_capturing(device: torch.device) -> bool:
    """Return whether a call is being captured now. Work that must happen once, such as allocation, is not allowed then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def host_computes(device: torch.device) -> bool:
    """Return whether threads of this process do the computing, so that other programs on the cores slow it down."""
    return device.type == "cpu"


def batch_changes_cost(device: torch.device) -> bool:
    """Return whether rows of several sequences cost more or less than as many rows of one. On a CPU they cost the same."""
    return device.type == "cuda"


def has_half_precision_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether our kernels for layers in half precision run here."""
    return device.type == "cuda" and dtype in HALF


def has_packed_linears(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether oneDNN can lay out weights of this dtype in blocks, which makes passes of several rows cheaper."""
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()


def has_code_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether our products with quantised weights run here."""
    return device.type == "cpu" and dtype == torch.float32


def is_bound_by_reading(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a pass over one row takes about as long as reading the weights. Many CPUs compute in half precision far
    slower than they read."""
    return device.type == "cuda" or dtype in (torch.float32, torch.float64)


def layer_seconds(device: torch.device) -> float:
    """Return an upper bound, in seconds, on the time of a layer that reads next to nothing."""
    return 1e-4 if device.type == "cuda" else 1e-3


def name_of(device: torch.device) -> str:
    """Return the maker's name of a GPU; empty for a CPU, which torch does not name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def release_unused(device: torch.device) -> None:
    """Give back memory that torch holds unused, so that `free_memory` counts it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> int | None:
    """Return how many bytes can still be allocated on a device; None if that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as report:
            fields = dict(line.split(":") for line in report)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
