# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding: the plain function, and its angles inside Triton kernels (triton_angles.py)."""

from .reference import rope

__all__ = ["rope"]
