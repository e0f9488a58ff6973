# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1 for vLLM: one model core, a thin adapter to the host."""

from pathlib import Path

__version__ = "0.1.0"

# In a checkout the subpackages `kernels` and `eplb` lie beside this folder; a wheel carries them
# inside it (setup.cfg). Both a bare checkout on PYTHONPATH and an editable install find them here.
_here = Path(__file__).resolve().parent
if not (_here / "kernels").is_dir() and (_here.parent / "kernels").is_dir():
    __path__.append(str(_here.parent))
del _here, Path
