"""Normalise the messages of errors, so that errors with one cause have one text and one group id."""

import hashlib
import re
from functools import cache, lru_cache

MAX_LENGTH = 500
"""Characters of a message that are looked at: the time and the text are bounded."""

_QUOTED = (
    r"(?P<quoted>(?<![\w#<>*])(?P<mark>['\"`])(?!(?P=mark))(?:(?!(?P=mark)).|(?P=mark)(?=[\w#<*]))+(?:END))"
)
_TOKENS = r"""
  | (?P<url>(?<![\w#<>*])[a-zA-Z][a-zA-Z+]{1,9}://[^\s'"`<>\[\](){},;]+)
  | (?P<mail>(?<![\w.+\-#<>*])\w[\w.+\-]{0,63}@\w[\w\-]*(?:\.\w[\w\-]*)+)
  | (?P<uuid>(?<![\w#<>*])[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}(?![\w#<*]))
  | (?P<date>(?<![\w#<>*])\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?(?![\w#<*]))
  | (?P<time>(?<![\w#<>*:])\d\d?:\d\d(?::\d\d(?:[.,]\d+)?)?(?![\w#<*:]))
  | (?P<ip>(?<![\w#<>*.])\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?(?![\w#<*]))
  | (?P<ip6>(?<![\w#<>*:])(?=[0-9a-fA-F:]*\d)[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{0,4}){2,7}(?![\w#<*:]))
  | (?P<drive>(?<![\w#<>*])[a-zA-Z]:\\[\w.\-+\\*#]+)
  | (?P<path>(?<![\w#<>*./~])(?:/+[\w.\-+%@=~*#]+)+/*)
  | (?P<id>(?<![\w#<>*])(?:(?=[a-fA-F]*\d)[0-9a-fA-F]{8,}|[0-9a-fA-F]{16,})(?![\w#<*]|[.,]\d))
  | (?P<number>(?<![\w#<>*])\d+(?:[.,]\d+)*(?=[A-Za-zµ]{0,3}(?![\w#<*])))
  | (?P<word>(?<![\w#<>*])(?=[^\W\d]*\d)\w+)
  | (?P<digits>\d+)
"""
_GUARD = r"(?!\s|(?<=\w)[^\W\d])"
"""Nothing begins at white space, nor at a letter inside of a word: most characters are passed by one look, in half of
the time."""
_END = r"(?P=mark)(?![\w#<*])"
_DIGITS = re.compile(r"\d+")
_ADDRESS = re.compile(r"0[xX][0-9a-fA-F]+")
_HEX = re.compile(r"[0-9a-fA-F]{8,}")
_TURN = re.compile(r"(?<=\d)(?=[^\W\d])|(?<=[^\W\d])(?=\d)")
_GROUP_ID = re.compile(r"[0-9a-f]{12}")
_SHORTEST_ID, _TURNS_OF_ID = 8, 3
"""Letters and digits that take turns so often are an id; `python3` and `node12a` are not."""


@lru_cache(maxsize=4096)
def normalise_message(message: str) -> str:
    """Return a message with placeholders for what differs from one failure to the next.

    A placeholder is never longer than what it stands for. Numbers become `#`, quotations `'*'`, paths `/*`, e-mail
    addresses `*@*`, and the others `<url>`, `<date>` and `<ip>`. Ids become `#` in any notation (decimal, hexadecimal,
    a UUID, letters and digits in turns): of one kind of id some happen to be numbers. White space becomes one space.
    What is normalised stays as it is.
    """
    text = " ".join(message[: 4 * MAX_LENGTH].split())
    is_cut = len(text) > MAX_LENGTH
    text = text[:MAX_LENGTH].rstrip()
    return _compile(is_cut=is_cut).sub(_replace, text)


@cache
def _compile(*, is_cut: bool) -> re.Pattern[str]:
    """Return the pattern of all that differs, compiled for the first error: that takes a millisecond.

    In the beginning of a long message a quotation may lack its end.
    """
    end = rf"{_END}|\Z" if is_cut else _END
    return re.compile(_GUARD + "(?:" + _QUOTED.replace("END", end) + _TOKENS + ")", re.VERBOSE)


@lru_cache(maxsize=4096)
def make_group_id(task: str, error_type: str, pattern: str) -> str:
    """Return the id of a group."""
    text = "\0".join((task, error_type, pattern)).encode(errors="surrogatepass")
    return hashlib.blake2s(text, digest_size=6).hexdigest()


def parse_cause(cause: str) -> str:
    """Return the id of the group of a cause, as scripts name it; '' for none.

    `recover.lua` has no such hash, and names what `make_group_id` makes it of.
    """
    parts = cause.split("\0")
    return make_group_id(*parts) if len(parts) == 3 else cause if is_group_id(cause) else ""


def make_death_pattern(why: str) -> str:
    """Return the normalised message of jobs that are dead because they took workers down.

    Args:
        why: Why the last of them ended; '' when nobody knows.
    """
    # Any number of workers is the same placeholder.
    return normalise_message("took its worker down 2 times" + (f"; at last: {why}" if why else ""))


def is_group_id(text: str) -> bool:
    """Return whether `text` is the id of a group."""
    return _GROUP_ID.fullmatch(text) is not None


def _replace(match: re.Match[str]) -> str:
    kind, text = match.lastgroup or "", match.group()
    match kind:
        case "quoted":
            return f"{text[0]}*{text[0]}" if len(text) > 2 else text
        case "url" | "date":
            return f"<{kind}>"
        case "ip" | "ip6":
            return "<ip>" if len(text) > 3 else "#"
        case "mail":
            return "*@*"
        case "path":
            return "/*"
        case "drive":
            return f"{text[:3]}*"
        case "word":
            return _replace_word(text)
        case _:
            return "#"


def _replace_word(word: str) -> str:
    if _ADDRESS.fullmatch(word):
        return "#"
    return "_".join(map(_replace_part, word.split("_")))


def _replace_part(part: str) -> str:
    """Replace a part of a word between underscores, as of `ch_8fK2q9Lz77`."""
    has_digit = _DIGITS.search(part) is not None
    is_id = len(part) >= _SHORTEST_ID and len(_TURN.findall(part)) >= _TURNS_OF_ID
    return "#" if has_digit and (is_id or _HEX.fullmatch(part)) else _DIGITS.sub("#", part)


def remove_source_lines(traceback: str) -> str:
    """Return the text of a traceback without the lines of source code: with files, line numbers and functions alone.

    What follows the line of a frame and is indented below it is source, also the marks under it. The messages of
    errors stay.
    """
    kept: list[str] = []
    indent = -1
    for line in traceback.split("\n"):
        text = line.lstrip(" |")
        depth = len(line) - len(text)
        if text.startswith('File "'):
            indent = depth
        elif indent >= 0 and depth > indent:
            continue
        else:
            indent = -1
        kept.append(line)
    return "\n".join(kept)
