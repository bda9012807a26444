"""Options of commands as data, and the argparse parser that is made from them."""

import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, NoReturn

PROGRAM = "python -m tilewise"
NUMBERS = {int: "a whole number", float: "a number"}


class Option(NamedTuple):
    """An option of a command; without dashes, its argument."""

    name: str
    help: str
    value: str | None = None
    """What the help calls its value; a flag has none."""
    kind: type = str
    least: int | None = None
    default: Any = None
    many: bool = False
    """Whether it may be given several times, for a list of values."""

    def add_to(self, parser: ArgumentParser) -> None:
        text = self.help if self.default is None else f"{self.help} [default: {self.default}]"
        how: dict[str, Any] = {"action": "store_true"}
        if self.value is not None:
            how = {"action": "append" if self.many else "store", "metavar": self.value, "type": self.read}
        if self.default is not None:
            how["default"] = self.default
        parser.add_argument(self.name, help=text.replace("%", "%%"), **how)

    def read(self, text: str) -> Any:
        """Return the value of a text."""
        try:
            value = self.kind(text)
        except ValueError:
            value = None
        if value is None or (self.least is not None and value < self.least):
            least = "" if self.least is None else f" >= {self.least}"
            raise ArgumentTypeError(f"must be {NUMBERS[self.kind]}{least}, got {text!r}")
        return value


class Parser(ArgumentParser):
    """A parser of one command, or of none; it answers what it does not understand with one sentence."""

    def __init__(self, command: str, description: str | None, options: Sequence[Option], **settings: Any) -> None:
        prog = f"{PROGRAM} {command}".rstrip()
        usage = " ".join([prog, "[options]", *(o.value or "" for o in options if not o.name.startswith("-"))])
        super().__init__(prog, **{"usage": usage, "description": description, "allow_abbrev": False, **settings})
        self.options = {option.name: option for option in options}
        for option in options:
            option.add_to(self)

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the values of all options by name."""
        found, unknown = self.parse_known_args([*self._joined(words)])
        if unknown:
            close = get_close_matches(unknown[0].partition("=")[0], self.options, 1, cutoff=0.8)
            meant = f" (did you mean {close[0]}?)" if close else ""
            self.error(f"arguments must be those of {self.prog}, got {unknown[0]}{meant}")
        return vars(found)

    def error(self, message: str) -> NoReturn:
        """Print a sentence, and end with exit status 2."""
        sentence = re.sub("^argument (--[^:]+):", r"\1", message)  # argparse names the option first, too
        self.exit(2, f"tilewise: {sentence}; run {self.prog} --help\n")

    def _joined(self, words: Sequence[str]) -> Iterator[str]:
        """Yield `--window=-,0` for `--window -,0`, whose value argparse would take for an option."""
        rest = iter(words)
        for word in rest:
            if not word.startswith("-") or word not in self.options or self.options[word].value is None:
                yield word
                continue
            value = next(rest, "--")
            if value == "--":
                self.error(f"{word} must have a value, got none")
            yield f"{word}={value}"
