# SPDX-License-Identifier: Apache-2.0
"""A tensor on its way to the CPU, read when somebody needs it."""

from __future__ import annotations

import numpy as np
import torch


def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream that `HostCopy` uses on `device`; None on a CPU, which has none."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class HostCopy:
    """A copy of `tensor` as it is at this point of the device's queue; starting it does not wait."""

    def __init__(self, tensor: torch.Tensor, stream: torch.cuda.Stream | None):
        self._event = None
        if stream is None:
            self._cpu = tensor.clone()
            return
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._cpu = tensor.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)
            self._event.record(stream)
        tensor.record_stream(stream)

    def arrived(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> np.ndarray:
        """The values, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._cpu.numpy()
