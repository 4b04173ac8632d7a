"""Python source split into strings, comments, numbers and keywords by one regular expression.

It is used to highlight pages and to find comments. pygments does the same ten times slower, which is minutes for
thousands of files; it is used for other languages.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator

_PREFIX = r"(?i:[rbuft]|rb|br|rf|fr|tr|rt)?"
_STRING = r"""
    (?:\"\"\"[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*(?:\"\"\"|\Z)|'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*(?:'''|\Z)
    |"[^"\\\n]*(?:\\.[^"\\\n]*)*(?:"|(?=\n)|\Z)|'[^'\\\n]*(?:\\.[^'\\\n]*)*(?:'|(?=\n)|\Z))
"""
_COMMENT = re.compile(rf"\#([^\n]*)|{_STRING}", re.VERBOSE | re.DOTALL)
_TOKEN = re.compile(  # names and space are matched only to be passed over quickly
    rf"""(?P<n>(?m:^)[ \t]*@[\w.]+)
    |\n+|[ ]+
    |(?P<k>\b(?:{"|".join(keyword.kwlist)})\b)
    |(?!{_PREFIX}["'])[^\W\d]\w*
    |(?P<c>\#[^\n]*)
    |(?P<s>(?<!\w){_PREFIX}{_STRING})
    |(?P<m>\b(?:0[xXoObB][\da-fA-F_]+|\d[\d_]*(?:\.[\d_]*)?(?:[eE][+-]?\d+)?)[jJ]?)""",
    re.VERBOSE | re.DOTALL,
)


def tokens(text: str) -> Iterator[tuple[str, int, int]]:
    """Kind (pygments' short class name), start and end of each token that is highlighted."""
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        if kind is not None:
            yield kind, match.start(), match.end()


def comments(text: str) -> Iterator[tuple[str, int]]:
    """Each comment without its ``#``, with its line.

    Example:
        >>> list(comments("x = '# no'  # yes\\n"))
        [(' yes', 1)]
    """
    line, before = 1, 0
    for match in _COMMENT.finditer(text):
        if match[1] is not None:
            line += text.count("\n", before, match.start())
            before = match.start()
            yield match[1], line
