"""Python source split into strings, comments, numbers and keywords by one regular expression.

It is used to highlight pages and to find comments. pygments does the same ten times slower, which is minutes for
thousands of files; it is used for other languages.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator

_PREFIX = r"(?i:[rbuft]|rb|br|rf|fr|tr|rt)?"
_TOKEN = re.compile(
    rf"""(?P<c>\#[^\n]*)
    |(?P<s>(?:(?<!\w){_PREFIX})(?:\"\"\"(?:[^\\]|\\.)*?(?:\"\"\"|\Z)|'''(?:[^\\]|\\.)*?(?:'''|\Z)
      |"(?:[^"\\\n]|\\.)*(?:"|(?=\n)|\Z)|'(?:[^'\\\n]|\\.)*(?:'|(?=\n)|\Z)))
    |(?P<k>\b(?:{"|".join(keyword.kwlist)})\b)
    |(?P<m>\b(?:0[xXoObB][\da-fA-F_]+|\d[\d_]*(?:\.[\d_]*)?(?:[eE][+-]?\d+)?)[jJ]?)
    |(?P<n>(?m:^)[ \t]*@[\w.]+)""",
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
    for kind, start, end in tokens(text):
        if kind == "c":
            line += text.count("\n", before, start)
            before = start
            yield text[start + 1 : end], line
