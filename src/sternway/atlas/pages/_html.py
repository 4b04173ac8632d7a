"""A page as HTML: the body is written from its blocks, the rest comes from a Jinja template."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from html import escape
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from sternway.atlas._paths import link, shown
from sternway.atlas.pages._blocks import At, Block, Code, Inline, Items, Page, Paragraph, Source, Table, Words, slug
from sternway.atlas.pages._highlight import highlight
from sternway.atlas.pages._links import relative


@functools.cache
def _template(name: str) -> Any:
    environment = Environment(
        loader=PackageLoader("sternway.atlas.pages", "assets"), autoescape=select_autoescape(["html"]), trim_blocks=True
    )
    return environment.get_template(name)


def to_html(page: Page, tree: str) -> str:
    """The whole page. ``tree``: the name of the source tree."""
    name = f"{page.name}.html"
    sections = [
        (section.title, slug(section.title), Markup("\n".join(_blocks(section.blocks, name))))
        for section in page.sections
    ]
    text: str = _template("page.html").render(
        title=page.title,
        tree=tree,
        crumbs=list(_crumbs(page, tree, name)),
        sections=sections,
        site=link(name, "_site"),
        root=link(name, ".") if "/" in name else ".",
        here=name,
    )
    return text


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


def _blocks(blocks: tuple[Block, ...], page: str) -> Iterator[str]:
    for block in blocks:
        if isinstance(block, Paragraph):
            yield f"<p>{_words(block.words, page)}</p>"
        elif isinstance(block, Items):
            tag = "ol" if block.ordered else "ul"
            yield f"<{tag}>{''.join(f'<li>{_words(item, page)}</li>' for item in block.items)}</{tag}>"
        elif isinstance(block, Table):
            head = "".join(f"<th>{escape(cell)}</th>" for cell in block.head) if any(block.head) else ""
            rows = "".join(
                f"<tr>{''.join(f'<td>{_words(cell, page)}</td>' for cell in row)}</tr>" for row in block.rows
            )
            yield f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        else:
            yield _source(block)


def _source(block: Source) -> str:
    lines = highlight(block.text, block.lexer)
    rows = "\n".join(f"<i id=L{number}></i>{line}" for number, line in enumerate(lines, 1))
    return f'<pre class="source">{rows}\n</pre>'


def _words(words: Words, page: str) -> str:
    return "".join(_inline(item, page) for item in words)


def _inline(item: Inline, page: str) -> str:
    if isinstance(item, str):
        return escape(item)
    if isinstance(item, Code):
        return f"<code>{escape(' '.join(item.text.split()))}</code>"
    if isinstance(item, At):
        label = item.text or f"{shown(item.path)}:{item.line}"
        target = relative(page, "docs", item.path, ".html")
        here = "" if target == page.rpartition("/")[2] else target
        return f'<a class="at" href="{here}#L{item.line}">{escape(label)}</a>'
    return f'<a href="{relative(page, item.kind, item.path, ".html")}">{escape(item.text)}</a>'


def index_html(name: str, path: str, title: str, tree: str, body: str, is_file: bool) -> str:
    """A keyword index page around a finished body."""
    page = Page(name, path, title, (), is_file)
    html_name = f"{name}.html"
    text: str = _template("page.html").render(
        title=title,
        tree=tree,
        crumbs=list(_crumbs(page, tree, html_name)),
        sections=[("", "", Markup(body))],
        site=link(html_name, "_site"),
        root=link(html_name, ".") if "/" in html_name else ".",
        here=html_name,
        keywords=True,
    )
    return text
