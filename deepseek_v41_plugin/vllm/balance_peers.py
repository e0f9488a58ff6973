# SPDX-License-Identifier: Apache-2.0
"""What a rebalancer needs of its neighbours: the board they write on, and their buffers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import cache

import torch
from torch.distributed import TCPStore
from vllm.distributed import get_ep_group
from vllm.distributed.parallel_state import in_the_same_node_as
from vllm.utils.network_utils import get_ip

from ..eplb.board import Board, BoardLost
from ..eplb.transport import PeerBuffers, TransportError, same_weights
from ..eplb.transport.shm import SharedMemory
from ..eplb.transport.symm_mem import SymmetricMemory

logger = logging.getLogger("vllm.dsv41")


@cache
def _store(timeout: int) -> TCPStore:
    """One store for all models of this worker; rank 0 of the expert parallel group holds it.  A collective call."""
    group, limit = get_ep_group(), timedelta(seconds=timeout)
    host = "127.0.0.1" if all(in_the_same_node_as(group.cpu_group)) else get_ip()
    if group.rank_in_group:
        return TCPStore(*group.broadcast_object(None), is_master=False, timeout=limit)
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
    group.broadcast_object((host, store.port))
    return store


def open_board(name: str, timeout: int) -> Board:
    group = get_ep_group()
    return Board(_store(timeout), name, group.rank_in_group, group.world_size, timeout)


def open_peers(transport: str, board: Board, weights: Sequence[Sequence[torch.Tensor]], timeout: int) -> PeerBuffers | None:
    """Buffers for the layers of `weights`; None, on all ranks and with the reason said, where there are none."""
    try:
        same_weights(board, weights, timeout)
        if transport == "shm" or (transport == "auto" and weights[0][0].device.type == "cpu"):
            return SharedMemory.open(board, weights[0], timeout)
        return SymmetricMemory.open(board, weights[0], get_ep_group().device_group, timeout)
    except (TransportError, BoardLost, TimeoutError) as error:
        logger.error("EPLB %s: experts stay where they are, no buffers for moving them: %s", board.name, error)
        return None
