"""A command line out of a dataclass: every field is a flag."""

import argparse
from collections.abc import Sequence
from dataclasses import field, fields
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

T = TypeVar("T")


def option(default: Any, help: str) -> Any:
    """A field of a dataclass: its default, and the help that the command line shows."""
    return field(default=default, metadata={"help": help})


def flag(name: str) -> str:
    """The flag of a field: `batch_size` is `--batch-size`."""
    return "--" + name.replace("_", "-")


def parse_options(
    options: type[T], program: str, about: str, arguments: Sequence[str] | None = None
) -> T:
    """An ``options`` dataclass filled from the command line (or from ``arguments``).

    A field ``batch_size: int`` becomes ``--batch-size``, a ``bool`` becomes ``--name`` and
    ``--no-name``. An unknown flag or a bad value ends the process with one line and exit code 2;
    so does a ValueError that the dataclass raises.
    """
    parser = Parser(
        prog=program,
        description=about,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    types = get_type_hints(options)
    for item in fields(options):  # type: ignore[arg-type]
        help = f"{item.metadata['help']} (default: {item.default})"
        kind = (get_args(types[item.name]) or (types[item.name],))[0]
        if kind is bool:
            action = argparse.BooleanOptionalAction
            parser.add_argument(flag(item.name), default=item.default, help=help, action=action)
        else:
            parser.add_argument(flag(item.name), default=item.default, help=help, type=kind)
    try:
        return options(**vars(parser.parse_args(arguments)))
    except ValueError as error:
        parser.error(str(error))


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")
