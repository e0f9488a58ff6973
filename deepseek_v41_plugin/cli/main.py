# SPDX-License-Identifier: Apache-2.0
"""`dsv41 COMMAND`: one module of this package a command, imported only when it is asked for.

A command module has `add_parser(subparsers)`, which adds a parser named like the command and sets
its default `run` to a function of the parsed arguments that returns the exit code (None is 0).
"""

import argparse
import importlib
import sys
from importlib.util import find_spec

import deepseek_v41_plugin

COMMANDS = {
    "tiny": "write a small random checkpoint in the released layout",
    "doctor": "say what this host can serve, with which implementation, and why",
    "profile-verify": "measure what verifying drafts costs on this machine",
    "verify-replay": "compare the modes of SWA bounded replay: metadata, and logprobs of real engines",
    "eplb-sim": "replay recorded expert loads through a placement policy",
}


def module_name(command: str) -> str:
    return "deepseek_v41_plugin.cli." + command.replace("-", "_")


def available() -> dict[str, str]:
    """The commands that this build contains, each with its line of help."""
    return {name: text for name, text in COMMANDS.items() if find_spec(module_name(name))}


def overview() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dsv41",
        description="DeepSeek-V4.1 for vLLM.",
        epilog="commands:\n" + "\n".join(f"  {n:<14} {t}" for n, t in available().items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=deepseek_v41_plugin.__version__)
    parser.add_argument("command", choices=list(available()), metavar="COMMAND", help="see below")
    return parser


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    command = overview().parse_args(argv[:1]).command
    parser = argparse.ArgumentParser(prog="dsv41")
    try:
        module = importlib.import_module(module_name(command))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("deepseek_v41_plugin"):
            raise
        print(
            f"dsv41 {command}: {error.name} is not installed; install a host first (.ci/setup, or "
            "pip install 'deepseek-v41-plugin[vllm]')",
            file=sys.stderr,
        )
        return 1
    module.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(argv)
    return args.run(args) or 0


if __name__ == "__main__":
    sys.exit(main())
