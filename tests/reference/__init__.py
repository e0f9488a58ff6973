# SPDX-License-Identifier: Apache-2.0
"""An uncached float64 forward of DeepSeek-V4.1-Flash, independent of the package."""

from .model import ReferenceModel

__all__ = ["ReferenceModel"]
