"""A page as HTML: the body is written from its blocks, the rest comes from a Jinja template."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from html import escape
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from sternway.atlas._paths import anchor_of, link, shown
from sternway.atlas.pages._blocks import (
    At,
    Block,
    Code,
    Diagram,
    Emphasis,
    Fence,
    Fold,
    Heading,
    Inline,
    Items,
    Note,
    Page,
    Paragraph,
    Ref,
    Signature,
    Source,
    Strong,
    Table,
    To,
    Url,
    Words,
    slug,
)
from sternway.atlas.pages._diagram import svg
from sternway.atlas.pages._highlight import highlight
from sternway.atlas.pages._links import relative

_NAMES = re.compile(r"[^\W\d][\w.]*")


@functools.cache
def _template(name: str) -> Any:
    environment = Environment(
        loader=PackageLoader("sternway.atlas.pages", "assets"), autoescape=select_autoescape(["html"]), trim_blocks=True
    )
    return environment.get_template(name)


def to_html(page: Page, tree: str) -> str:
    """The whole page. ``tree``: the name of the source tree."""
    name = f"{page.name}.html"
    base = relative(name, "source", page.path, ".html") if page.is_file and name.endswith("_docs.html") else ""
    writer = HtmlWriter(name, base)
    sections = []
    for section in page.sections:
        body = Markup("\n".join(writer.block(block) for block in section.blocks))
        inside = [block for block in section.blocks if isinstance(block, Heading) and block.level == 3 and block.anchor]
        entries = [(block.name, anchor_of(block.anchor)) for block in inside]
        sections.append((section.title, slug(section.title), body, entries))
    return _page(page, tree, sections, base=base, here=writer.here)


def _page(page: Page, tree: str, sections: list[Any], **more: Any) -> str:
    name = f"{page.name}.html"
    text: str = _template("page.html").render(
        title=page.title,
        tree=tree,
        crumbs=list(_crumbs(page, tree, name)),
        sections=sections,
        site=link(name, "_site"),
        root="/".join([".."] * name.count("/")) or ".",
        is_code=page.is_file,
        **more,
    )
    return text


def index_html(page: Page, tree: str, body: str, base: str = "") -> str:
    """A keyword index page around a finished body. ``base``: the page beside it that ``#L12`` means."""
    return _page(page, tree, [("", "", Markup(body), [])], keywords=True, base=base)


def _crumbs(page: Page, tree: str, name: str) -> Iterator[tuple[str, str]]:
    """The folders that lead to the page: text and link of each."""
    yield tree, relative(name, "index", "", ".html")
    parts = page.path.split("/") if page.path else []
    folders = parts[:-1] if page.is_file else parts
    for index in range(len(folders)):
        path = "/".join(folders[: index + 1])
        yield shown(folders[index]), relative(name, "index", path, ".html")
    if page.is_file and page.path:
        yield shown(parts[-1]), relative(name, "docs", page.path, ".html")


class HtmlWriter:
    """Writes the blocks of one page. ``base``: the page beside it that ``#L12`` means, if not this one."""

    def __init__(self, page: str, base: str = "") -> None:
        self.page, self.base = page, base
        self.here = page.rpartition("/")[2] if base else ""  # what a link to this page's own anchors starts with
        self.anchors: set[str] = set()

    def block(self, block: Block) -> str:
        if isinstance(block, Paragraph):
            return f"<p>{self.words(block.words)}</p>"
        if isinstance(block, Items):
            tag = "ol" if block.ordered else "ul"
            return f"<{tag}>{''.join(f'<li>{self.words(item)}' for item in block.items)}</{tag}>"
        if isinstance(block, Table):
            return self._table(block)
        if isinstance(block, Heading):
            name = f"<code>{escape(block.name)}</code>"
            return (
                f"<h{block.level}{self._id(block.anchor)}><small>{escape(block.kind)}</small> {name}</h{block.level}>"
            )
        if isinstance(block, Fence):
            return f'<pre class="code">{chr(10).join(highlight(block.text, block.lexer))}</pre>'
        if isinstance(block, Signature):
            return self._signature(block)
        if isinstance(block, Source):
            return _source(block)
        if isinstance(block, Diagram):
            return f"<figure>{svg(block, self.target)}<figcaption>{escape(block.title)}</figcaption></figure>"
        inner = "\n".join(map(self.block, block.blocks))
        if isinstance(block, Note):
            return f'<div class="note {slug(block.title)}"><p><b>{escape(block.title)}</b></p>{inner}</div>'
        assert isinstance(block, Fold)
        return f"<details><summary>{escape(block.title)}</summary>{inner}</details>"

    def _table(self, block: Table) -> str:
        """A table; closing tags that HTML does not need are left out, since tables are most of a page."""
        head = "<thead><tr>" + "".join(f"<th>{escape(cell)}" for cell in block.head) if any(block.head) else ""
        rows = "".join(f"<tr>{''.join(f'<td>{self.words(cell)}' for cell in row)}" for row in block.rows)
        return f'<div class="wide"><table>{head}<tbody>{rows}</table></div>'

    def _id(self, name: str) -> str:
        """The id of a definition's place; only the first place of a name has one."""
        if not name or name in self.anchors:
            return ""
        self.anchors.add(name)
        return f" id={anchor_of(name)}"

    def _signature(self, block: Signature) -> str:
        """Code whose known names are links. The first name is the definition's own."""
        known = {ref.text: ref for ref in block.links}
        rows = []
        for row in highlight(block.text, block.lexer):
            rows.append(_linked(row, known, self.target) if known else row)
        return f'<pre class="signature">{chr(10).join(rows)}</pre>'

    def words(self, words: Words) -> str:
        return "".join(map(self._inline, words))

    def _inline(self, item: Inline) -> str:
        if isinstance(item, str):
            return escape(item, quote=False)
        if isinstance(item, Code):
            return f"<code{self._id(item.anchor)}>{escape(' '.join(item.text.split()), quote=False)}</code>"
        if isinstance(item, Strong):
            return f"<b>{escape(item.text, quote=False)}</b>"
        if isinstance(item, Emphasis):
            return f"<em>{escape(item.text, quote=False)}</em>"
        if isinstance(item, At):
            label = item.text or f"{shown(item.path)}:{item.line}"
            return f"<a href={self.target(item)}>{escape(label)}</a>"
        if isinstance(item, Ref):
            return f"<a href={self.target(item)}><code>{escape(item.text)}</code></a>"
        if isinstance(item, Url):
            return f'<a href="{escape(item.address)}">{escape(item.text)}</a>'
        return f"<a href={self.target(item)}>{escape(item.text)}</a>"

    def target(self, item: At | To | Ref) -> str:
        """A link's address; it needs no quotes, since the paths of pages have none of the characters that do."""
        if isinstance(item, At):
            source = relative(self.page, "source", item.path, ".html")
            return f"{'' if source == self.base else source}#L{item.line}"
        if isinstance(item, To):
            return relative(self.page, item.kind, item.path, ".html")
        page = relative(self.page, "docs", item.path, ".html")
        same = page == self.page.rpartition("/")[2]
        return f"{self.here if same else page}#{anchor_of(item.name)}"


def _source(block: Source) -> str:
    lines = highlight(block.text, block.lexer)
    rows = "\n".join(f"<i id=L{number}></i>{line}" for number, line in enumerate(lines, 1))
    return f'<pre class="source">{rows}\n</pre>'


def _linked(row: str, known: dict[str, Ref], target: Any) -> str:
    """Put links around the known names in a highlighted line, outside its tags."""
    parts = re.split(r"(<[^>]*>|&\w+;)", row)
    for index in range(0, len(parts), 2):
        parts[index] = _NAMES.sub(lambda match: _name(match, known, target), parts[index])
    return "".join(parts)


def _name(match: re.Match[str], known: dict[str, Ref], target: Any) -> str:
    text, ref = match[0], known.get(match[0])
    if ref is None or match.string[match.end() : match.end() + 1] in (":", "="):  # a parameter's own name
        return text
    return f"<a href={target(ref)}>{text}</a>"
