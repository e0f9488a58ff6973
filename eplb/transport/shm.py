# SPDX-License-Identifier: Apache-2.0
"""Buffers in POSIX shared memory: for CPU tensors of ranks on one machine."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import torch

from ..board import Board
from . import TransportError, layout, views

FOLDER = Path("/dev/shm")


def supported(tensors: Sequence[torch.Tensor]) -> tuple[bool, str]:
    """Whether this rank's tensors can use it, and why not."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return False, "shared memory holds CPU tensors only"
    if not FOLDER.is_dir():
        return False, f"there is no {FOLDER}"
    return True, ""


class SharedMemory:
    """PeerBuffers of CPU tensors.

    The files lose their names as soon as every rank has mapped them, so nothing is left behind however a rank ends.
    """

    def __init__(self, maps: list[mmap.mmap], tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [views(torch.frombuffer(memory, dtype=torch.uint8), tensors) for memory in maps]

    @classmethod
    def open(cls, board: Board, tensors: Sequence[torch.Tensor], timeout: float = 30.0) -> SharedMemory:
        """Buffers shaped as `tensors`, one layer's, which are equal on all ranks (`same_weights`).

        Every rank calls it; each learns of another's failure.  Raises TransportError.
        """
        ok, why = supported(tensors)
        size = max(layout(tensors)[1], mmap.PAGESIZE)
        path = FOLDER / f"dsv41-eplb-{os.getpid()}-{secrets.token_hex(8)}"
        own, known = None, [path.name]
        if ok:
            try:
                own = _create(path, size)
            except OSError as error:
                why = f"{size} bytes of {FOLDER}: {error.strerror}. Give the container more shared memory"
        try:
            said = [text.decode() for text in board.gather("shm", (f"+{path.name}" if own else f"-{why}").encode(), timeout)]
            known = [text[1:] for text in said if text.startswith("+")]
            for rank, text in enumerate(said):
                if text.startswith("-"):
                    raise TransportError(f"rank {rank}: {text[1:]}")
            maps, failed = [], ""
            for rank, text in enumerate(said):
                try:
                    maps.append(own if rank == board.rank else _attach(FOLDER / text[1:], size))
                except OSError as error:
                    failed = failed or f"rank {board.rank} cannot map the memory of rank {rank}: {error.strerror}. Are they on one machine?"
            if faults := [text.decode() for text in board.gather("shm mapped", failed.encode() or b"+", timeout) if text != b"+"]:
                raise TransportError(faults[0])
            return cls(maps, tensors)
        except TimeoutError as error:
            raise TransportError(str(error)) from error
        finally:
            for name in known:  # the others' too: they may have died
                (FOLDER / name).unlink(missing_ok=True)

    def tensors(self, rank: int) -> list[torch.Tensor]:
        return self._tensors[rank]

    def enter(self) -> None:
        pass

    def push(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src)

    def flush(self) -> None:
        pass

    def record(self) -> None:
        return None

    def wait(self, mark: None) -> None:
        pass

    def close(self) -> None:
        self._tensors = []  # the memory goes with the last tensor


def _create(path: Path, size: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)  # fails here when there is no room; a sparse file would fail at a write, by signal
        return mmap.mmap(fd, size)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)


def _attach(path: Path, size: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)
