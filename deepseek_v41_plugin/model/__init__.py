# SPDX-License-Identifier: Apache-2.0
"""The model in plain modules over `kernels`; no host is imported here.

Parameter names are the checkpoint's own, except that a layer's experts are stacked.
"""
