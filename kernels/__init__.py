# SPDX-License-Identifier: Apache-2.0
"""Kernels, one folder a family: `reference.py` is the plain form, every other file a faster twin.

Nothing here imports a host.  `registry.py` picks an implementation; `formats/` holds the bit layouts.
"""
