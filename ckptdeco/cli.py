"""The command line: ``ckptdeco demo``, ``ckptdeco --version``. Imports nothing heavy before it knows what to do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: without the program's name; None: those of the process.

    Returns:
        the exit code: 0; 1 if a result is not what it must be; 2 for wrong usage or a missing package.
    """
    parser = _make_parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    return _demo(options)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ckptdeco", description="Activation checkpointing for PyTorch: less memory, the same bits."
    )
    parser.add_argument("--version", action=_Version, help="print the version and leave")
    commands = parser.add_subparsers(dest="command", metavar="command")
    demo = commands.add_parser(
        "demo",
        help="train a small model under several policies and compare memory, time and results",
        description="Train a small transformer under several policies, and compare memory, time and results. "
        "The exit code is 1 if any result differs from the plain run by a bit.",
    )
    demo.add_argument(
        "--png",
        type=Path,
        default=Path("ckptdeco-demo.png"),
        metavar="PATH",
        help="where to write the picture (default: %(default)s)",
    )
    demo.add_argument("--steps", type=_positive, metavar="N", help="training steps per policy (default: 6)")
    demo.add_argument("--quick", action="store_true", help="a tiny model: seconds, but figures that say little")
    return parser


def _demo(options: argparse.Namespace) -> int:
    if not options.png.absolute().parent.is_dir():
        return _fail(f"there is no folder {options.png.parent} to write {options.png.name} to. Fix: create it first")
    from ckptdeco.demo.command import demo
    from ckptdeco.extras import MissingExtraError

    try:
        return demo(options.png, n_steps=options.steps, is_quick=options.quick)
    except MissingExtraError as error:
        return _fail(str(error))


def _fail(message: str) -> int:
    print(f"ckptdeco: {message}", file=sys.stderr)
    return 2


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


class _Version(argparse.Action):
    """Looks the version up only when asked: reading the installed metadata is slow."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"ckptdeco {version('ckptdeco')}")
        except PackageNotFoundError:
            print("ckptdeco (not installed; run from its source)")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
