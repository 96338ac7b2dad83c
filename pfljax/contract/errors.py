"""The errors that pfljax raises."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterable

from pfljax.contract import former_contract

# maximum characters of a value and of a message's text
LONGEST = 300
LONGEST_TEXT = 3000
# the folder of the library
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def shown(value: object, longest: int = LONGEST) -> str:
    """A value as part of one line: truncated, with line ends and other unprintable characters escaped."""
    characters = str(value)[: longest + 1]
    escaped = [
        character if character.isprintable() else repr(character)[1:-1] for character in characters
    ]
    text = "".join(escaped)
    return text if len(text) <= longest else f"{text[:longest]}..."


def few(names: Iterable[object], most: int = 20, longest: int = 60) -> str:
    """The first of some names, with commas, and how many more there are. Names of more characters are truncated."""
    names = list(names)
    first = ", ".join(shown(name, longest) for name in names[:most])
    if len(names) <= most:
        return first
    return f"{first}, ... {len(names) - most:,} more"


class ArgumentError(ValueError):
    """An invalid argument, in one line: which argument, its value, and what is accepted.

    The command line prints the same line under its own name for the argument.

    Attributes:
        argument: Name of the argument.
        text: What is wrong and what is accepted.
        value: The value, or None if it is not informative.
        owner: Registered name of the method if the argument is its hyperparameter, or what it is a field of, such as
            "privacy"; may be empty.

    Examples:
        >>> import pfljax as pfl
        >>> try:
        ...     pfl.FedProx(mu=-1)
        ... except pfl.ArgumentError as error:
        ...     print(error)
        fedprox.mu=-1: accepted: 0 or more
    """

    def __init__(self, argument: str, text: str, value: object = None, *, owner: str = "") -> None:
        self.argument = argument
        self.text = text
        self.value = value
        self.owner = owner
        super().__init__(self.line(f"{owner}.{argument}" if owner else argument))

    def with_owner(self, owner: str) -> ArgumentError:
        """The same error for a hyperparameter of the method registered as `owner`."""
        return ArgumentError(self.argument, self.text, self.value, owner=owner)

    def line(self, name: str) -> str:
        """The message, with the argument called `name`."""
        text = shown(self.text, LONGEST_TEXT)
        if self.value is None:
            return f"{name}: {text}"
        return f"{name}={shown(self.value)}: {text}"


def warn(argument: str, text: str) -> None:
    """Warns in one line about an argument that is accepted but probably a mistake."""
    warn_caller(f"{argument}: {shown(text, LONGEST_TEXT)}", UserWarning)


def warn_former(former: str, present: str) -> None:
    """Warns in one line that a name has changed. The former one works for one release."""
    warn_caller(f"{former} is now {present}", FutureWarning)


def warn_caller(text: str, category: type[Warning]) -> None:
    """Issues a warning at the line of the user's code that called the library."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__", "<string>")
    filename = frame.f_code.co_filename
    warnings.warn_explicit(text, category, filename, frame.f_lineno, module, registry)


def _is_inside(filename: str) -> bool:
    """Whether code belongs to the library, or imports a module."""
    return filename.startswith(PACKAGE) or filename.startswith("<frozen importlib")


def raised(error: BaseException, file: str) -> str:
    """An error in a user's file, in one line: where it was raised, and what the file should change."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    where = f"line {lines[-1]} of {os.path.basename(file)}" if lines else "the file"
    text = str(error).strip().split("\n")[0]
    hint = former_contract.hint(file)
    if isinstance(error, ArgumentError):
        return f"{where}: {text}{hint}"
    return f"{where} raised {type(error).__name__}: {text}{hint}"


class RunError(RuntimeError):
    """A run that failed, in one line.

    Attributes:
        reason: Why it failed.
        further: What else there is to say.

    Examples:
        >>> import pfljax as pfl
        >>> try:
        ...     raise pfl.RunError("the training loss is not finite", "Files are in runs/ditto.")
        ... except pfl.RunError as error:
        ...     print(error.reason)
        the training loss is not finite
    """

    def __init__(self, reason: str, further: str = "") -> None:
        """Sets the message: the reason, and what is `further` to say, such as where files are."""
        super().__init__(f"{reason}. {further}" if further else reason)
        self.reason = reason
        self.further = further


class OutOfMemory(RunError):
    """A run that does not fit in memory."""
