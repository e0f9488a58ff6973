# SPDX-License-Identifier: Apache-2.0
"""The machine, read in one place: device, compute capability, memory."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Hardware:
    """device "cuda" or "cpu"; capability (major, minor) of a CUDA device; memory in bytes, per device."""

    device: str
    name: str
    capability: tuple[int, int] | None
    count: int
    memory: int

    @property
    def sm(self) -> str:
        """"SM90" and the like, or "CPU"."""
        return "SM%d%d" % self.capability if self.capability else "CPU"


def detect() -> Hardware:
    """The first CUDA device if there is one, else the CPU."""
    if torch.cuda.is_available() and torch.version.hip is None:
        properties = torch.cuda.get_device_properties(0)
        capability = (properties.major, properties.minor)
        return Hardware("cuda", properties.name, capability, torch.cuda.device_count(), properties.total_memory)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware("cpu", f"{_cpu_name()}, {os.cpu_count()} cores", None, 1, memory)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
