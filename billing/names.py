"""Names that are safe in files, URLs and logs, and one-line texts.

Pure. Called by `billing.accounts`, `billing.ledger` and everything else that stores typed names.
"""

import re

from billing.errors import InvalidName

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")

# Prefixes of the request id in answers' ids.
ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")


def bare_id(name: str) -> str:
    """The ledger's request id for an answer's id."""
    return next((name[len(p) :] for p in ANSWER_PREFIXES if name.startswith(p)), name)


def check_name(name: str, what: str) -> str:
    """A name that is safe in files, URLs and logs. Raises `InvalidName`."""
    if not _NAME.fullmatch(name):
        raise InvalidName(
            f"{what} {name!r} is not a name: use up to 64 letters, digits and . _ @ -, "
            "beginning with a letter or digit"
        )
    return name


def check_text(text: str, what: str) -> str:
    """A one-line text of printable characters. Raises `InvalidName`.

    Invisible characters would deceive the reader of a log or a terminal: line ends, escapes, and
    changes of writing direction. PostgreSQL cannot store NUL either.
    """
    hidden = next((character for character in text if not character.isprintable()), None)
    if hidden is not None:
        raise InvalidName(
            f"the {what} holds the character U+{ord(hidden):04X}, which does not print; write one "
            "line of text"
        )
    return text
