# SPDX-License-Identifier: Apache-2.0
"""Number formats of V4.1: E4M3 and E2M1 values under E8M0 or E4M3 block scales.

| what                 | values     | block   | scale        | bytes for 512 / 128 dims |
|----------------------|------------|---------|--------------|--------------------------|
| dense weight         | E4M3       | 32 x 32 | E8M0         |                          |
| expert weight        | E2M1 pairs | 1 x 32  | E8M0         |                          |
| Linear input         | E4M3       | 32      | power of two | (not stored)             |
| window KV record     | E4M3       | 32      | E8M0         | 512 + 16 = 528           |
| global KV record     | E2M1 pairs | 16      | E4M3         | 256 + 32 = 288           |
| index key record     | E2M1 pairs | 32      | E8M0         | 64 + 4 = 68 (128 dims)   |
| the same in `fp8_ds_mla` | E4M3, bf16 RoPE | 64 | E8M0      | 448 + 128 + 8 = 584      |
| index key in `fp8_ds_mla` | E4M3  | row     | float32      | 128 + 4 = 132            |
| Engram row           | E4M3       | 32      | E8M0         |                          |

In a pair the low nibble is the even element.  Every rounding is to nearest, ties to even.
"""
