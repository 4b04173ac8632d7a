"""Docstrings in every style come out whole: text, lists, code, notes, tables of arguments, links."""

from __future__ import annotations

import pytest

from sternway.atlas.pages._blocks import (
    Code,
    Emphasis,
    Fence,
    Items,
    Note,
    Paragraph,
    Ref,
    Strong,
    Table,
    Url,
)
from sternway.atlas.pages._docstring_page import described
from sternway.atlas.pages._prose import prose, read
from sternway.atlas.relate._resolve import Symbol

GOOGLE = """\
Open a file.

Args:
    path: where it is,
        on disk.
    mode (str): how.

Returns:
    The file.

Raises:
    OSError: if it is not there.

Example:
    >>> open("x")
    1
"""
NUMPY = """\
Open a file.

Parameters
----------
path : Path
    Where it is, on disk.
mode : str
    How.

Returns
-------
file
    The file.

Raises
------
OSError
    If it is not there.
"""
SPHINX = """\
Open a file.

:param path: where it is, on disk.
:param mode: how.
:type mode: str
:returns: The file.
:raises OSError: if it is not there.
"""


def _cells(table: Table) -> list[list[str]]:
    return [["".join(getattr(word, "text", word) for word in cell) for cell in row] for row in table.rows]


@pytest.mark.parametrize("text", [GOOGLE, NUMPY, SPHINX])
def test_three_styles_give_the_same_sections(text: str) -> None:
    blocks = described(text, {}, "(path: Path, mode: str = 'r') -> File")
    assert blocks[0] == Paragraph(("Open a file.",))
    table = next(block for block in blocks if isinstance(block, Table))
    assert table.head == ("name", "type", "default", "meaning")
    rows = [[cell.lower() for cell in row] for row in _cells(table)]
    assert rows == [["path", "path", "", "where it is, on disk."], ["mode", "str", "'r'", "how."]]
    text_of = str(blocks)
    assert "Returns" in text_of
    assert "The file." in text_of
    assert "Code(text='OSError'" in text_of


def test_an_example_is_code() -> None:
    assert Fence('>>> open("x")\n1', "python") in [
        inner for block in described(GOOGLE, {}) for inner in (block.blocks if isinstance(block, Note) else (block,))
    ]


def test_words() -> None:
    names = {"run": Symbol("a.py", "run", 3), "torch.nn.Module": Symbol("b.py", "Module", 9)}
    assert prose("Calls ``run``, **twice**, *really*.", names) == (
        "Calls ",
        Ref("run", "a.py", "run", 3),
        ", ",
        Strong("twice"),
        ", ",
        Emphasis("really"),
        ".",
    )
    assert prose(":class:`~torch.nn.Module`", names) == (Ref("Module", "b.py", "Module", 9),)
    assert prose("`here <https://x.org/a>`_ and [there](https://x.org/b)") == (
        Url("https://x.org/a", "here"),
        " and ",
        Url("https://x.org/b", "there"),
    )
    assert prose("f(*args, **kwargs) and 2 * 3 * 4") == ("f(*args, **kwargs) and 2 * 3 * 4",)
    assert prose("[x](javascript:alert(1))") == ("[x](javascript:alert(1))",)


def test_blocks() -> None:
    text = """\
First line
of a paragraph::

    code = 1

- one
  goes on
- two

1. first
2. second

.. note:: Take care.

    And more.

.. code-block:: cpp

    int x;

.. include:: elsewhere.rst

Heading
-------

```js
y()
```

    a picture
      │
"""
    assert read(text) == [
        Paragraph(("First line of a paragraph:",)),
        Fence("code = 1", ""),
        Items((("one goes on",), ("two",))),
        Items((("first",), ("second",)), ordered=True),
        Note("Note", (Paragraph(("Take care.",)), Paragraph(("And more.",)))),
        Fence("int x;", "cpp"),
        Paragraph((Strong("Heading"),)),
        Fence("y()", "js"),
        Fence("a picture\n  │", ""),
    ]


def test_a_list_may_follow_a_colon_at_once() -> None:
    assert read("It does:\n1) this\n2) that") == [
        Paragraph(("It does:",)),
        Items((("this",), ("that",)), ordered=True),
    ]
    assert read("Either this\n- or that -\nis done.") == [Paragraph(("Either this - or that - is done.",))]


def test_a_result_may_take_several_lines() -> None:
    blocks = described("Do it.\n\nReturns:\n    An object that has\n    two lines.", {})
    assert blocks[1] == Paragraph((Strong("Returns"), " ", "An object that has two lines."))


def test_a_note_goes_on_below_its_first_line() -> None:
    text = ".. note:: The length is not\n    required by it.\n\n    But expected."
    (note,) = read(text)
    assert note == Note("Note", (Paragraph(("The length is not required by it.",)), Paragraph(("But expected.",))))


def test_indented_text_below_a_colon_stands_apart() -> None:
    found = read("It sets up:\n    name: the class,\n        made on the fly.\nThe rest.")
    assert found == [
        Paragraph(("It sets up:",)),
        Paragraph(("name: the class, made on the fly.",)),
        Paragraph(("The rest.",)),
    ]


def test_a_type_before_a_spaced_colon_is_a_type() -> None:
    text = "Draw.\n\nArgs:\n    weights (sequence)   : what to draw from\n    count (int, optional): how many"
    rows = next(
        block for block in described(text, {}, "(self, weights, count: int = 3)") if isinstance(block, Table)
    ).rows
    assert [row[:3] for row in rows] == [
        ((Code("weights"),), (Code("sequence"),), ()),
        ((Code("count"),), (Code("int"),), (Code("3"),)),
    ]


def test_titles_see_also_and_references_of_numpy_style() -> None:
    text = """\
====================
Tools (:mod:`tools`)
====================

See Also
--------
load : Load it.
save : Save it,
    on disk.

References
----------
.. [1] A paper,
       of 2020.
"""
    title, also, references = described(text, {})
    assert title == Paragraph((Strong("Tools (tools)"),))
    assert also == Note("See also", (Items((("load : Load it.",), ("save : Save it, on disk.",))),))
    assert references == Note("References", (Paragraph(("[1] ", "A paper, of 2020.")),))


def test_whatever_stands_there_nothing_fails() -> None:
    for text in (
        "",
        "::",
        "```",
        ".. note::",
        "- ",
        "1.",
        ">>> ",
        "`",
        "``a`",
        "a\n===",
        "|",
        "+---+",
        "\t- x\n\t\t- y",
        "#",
    ):
        described(text, {})
    assert described("Args:\n    broken", {}) != []
    assert Code("x y") in prose("`x y`")
