"""Text that a client chose, as lines of a log and messages may have it: on one line, and cut."""

# vLLM's own request ids have some 45 characters.
_ID_LENGTH = 80
_MESSAGE_LENGTH = 2000


def quoted(value: object, longest: int = _ID_LENGTH) -> str:
    """`value` as Python writes it, in quotes if it is a string, of about `longest` characters.

    Line feeds, escape sequences and all else that is not printed are escaped. What is cut off is
    counted: ``'aaaa'... (5,000 characters)``.
    """
    if isinstance(value, str):
        cut = repr(value[:longest])
        return cut if len(value) <= longest else f"{cut}... ({len(value):,} characters)"
    text = repr(value)
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text):,} characters)"


def one_line(message: str, longest: int = _MESSAGE_LENGTH) -> str:
    """A message of ours that quotes a client, without line feeds and of at most `longest`."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message[:longest])
    return line if len(message) <= longest else f"{line}..."
