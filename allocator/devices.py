"""One spelling for each device, so that two of them can be compared."""

import torch


def device_of(device: torch.device | str) -> torch.device:
    """The device, with its number: "cuda" is the current one."""
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found
