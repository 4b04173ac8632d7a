"""C, C++, CUDA, JavaScript and TypeScript, parsed by tree-sitter: definitions, calls, includes, doc comments.

Each file is parsed alone: macros are not expanded, and headers are not read into it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import tree_sitter_c
import tree_sitter_cpp
import tree_sitter_cuda
import tree_sitter_javascript
import tree_sitter_typescript
from tree_sitter import Language, Node, Parser

from sternway.atlas._records import Base, Call, Definition, Facts, Import, Keyword
from sternway.atlas.python._docstrings import first_paragraph
from sternway.atlas.read._comments import cleaned, first_comment, keywords_of

_LANGUAGES: dict[str, Callable[[], object]] = {
    "C": tree_sitter_c.language,
    "C++": tree_sitter_cpp.language,
    "CUDA": tree_sitter_cuda.language,
    "JavaScript": tree_sitter_javascript.language,
    "TypeScript": tree_sitter_typescript.language_tsx,
}
_SCRIPTS = ("JavaScript", "TypeScript")
_LONGEST = 160  # characters of a signature
_DEEPEST = 400  # nodes inside each other; generated files may nest further than Python's stack


class NodeKind(NamedTuple):
    """How a node defines something: the kind, and whether names inside belong to it."""

    kind: str
    is_scope: bool = False


_C_KINDS = {
    "function_definition": NodeKind("function", True),
    "class_specifier": NodeKind("class", True),
    "struct_specifier": NodeKind("struct", True),
    "union_specifier": NodeKind("union", True),
    "enum_specifier": NodeKind("enum", True),
    "namespace_definition": NodeKind("namespace", True),
    "alias_declaration": NodeKind("type"),
    "type_definition": NodeKind("type"),
    "preproc_def": NodeKind("macro"),
    "preproc_function_def": NodeKind("macro"),
    "enumerator": NodeKind("variable"),
    "field_declaration": NodeKind("variable"),
}
_SCRIPT_KINDS = {
    "function_declaration": NodeKind("function", True),
    "generator_function_declaration": NodeKind("function", True),
    "class_declaration": NodeKind("class", True),
    "abstract_class_declaration": NodeKind("class", True),
    "method_definition": NodeKind("method", True),
    "method_signature": NodeKind("method"),
    "abstract_method_signature": NodeKind("method"),
    "interface_declaration": NodeKind("interface", True),
    "type_alias_declaration": NodeKind("type"),
    "enum_declaration": NodeKind("enum", True),
    "internal_module": NodeKind("namespace", True),
    "field_definition": NodeKind("variable"),
    "public_field_definition": NodeKind("variable"),
    "property_signature": NodeKind("variable"),
}
_CLASSES = frozenset(("class_specifier", "struct_specifier", "union_specifier"))
_WRAPPERS = frozenset(
    ("template_declaration", "export_statement", "linkage_specification", "declaration", "field_declaration")
)


@functools.cache
def _parser(language: str) -> Parser:
    return Parser(Language(_LANGUAGES[language]()))


def read_parsed(text: str, language: str) -> tuple[Facts, list[Keyword]]:
    """Facts and keywords of one file."""
    data = text.encode("utf-8", "surrogatepass")
    reader = _SitterReader(data, language)
    reader.walk(_parser(language).parse(data).root_node, "", "", 0)
    definitions = tuple(dict.fromkeys(sorted(reader.definitions, key=lambda item: (item.line, item.name))))
    doc, line = first_comment(text)
    if definitions and line and definitions[0].doc_line == line:
        doc, line = "", 0  # it belongs to the first definition
    facts = Facts(
        language,
        "tree-sitter",
        purpose=first_paragraph(doc),
        purpose_line=line,
        doc=doc,
        definitions=definitions,
        imports=tuple(dict.fromkeys(reader.imports)),
        calls=tuple(reader.calls),
        bases=tuple(reader.bases),
    )
    return facts, keywords_of(text, definitions)


class _SitterReader:
    def __init__(self, data: bytes, language: str) -> None:
        self.data, self.language = data, language
        self.kinds = _SCRIPT_KINDS if language in _SCRIPTS else _C_KINDS
        self.mark = "." if language in _SCRIPTS else "::"
        self.definitions: list[Definition] = []
        self.imports: list[Import] = []
        self.calls: list[Call] = []
        self.bases: list[Base] = []

    def text(self, node: Node | None) -> str:
        if node is None:
            return ""
        return " ".join(self.data[node.start_byte : node.end_byte].decode("utf-8", "replace").split())

    def walk(self, node: Node, scope: str, function: str, depth: int) -> None:
        """Visit a node's children. ``scope``: what names inside belong to; ``function``: the function around."""
        if depth > _DEEPEST:
            return
        for child in node.named_children:
            inner, around = scope, function
            kind = self.kinds.get(child.type)
            if child.type in ("call_expression", "new_expression"):
                self._call(child, function)
            elif child.type in ("preproc_include", "import_statement"):
                self.imports += self._imported(child)
            elif child.type == "variable_declarator" and self.language in _SCRIPTS:
                inner, around = self._variable(child, scope, function)
            elif kind is not None and (name := self._name(child)):
                whole = self._define(child, kind, name, scope)
                inner = whole if kind.is_scope else scope
                around = whole if kind.kind in ("function", "method") else function
            elif child.type == "declaration" and not function and self.language not in _SCRIPTS:
                self._declared(child, scope)
            self.walk(child, inner, around, depth + 1)

    # -- definitions

    def _name(self, node: Node) -> str:
        if node.type.endswith("_specifier") and node.child_by_field_name("body") is None:
            return ""  # a use of the type, or a declaration ahead
        named = node.child_by_field_name("name") or node.child_by_field_name("property")
        if named is not None:
            return self.text(named)
        at = node.child_by_field_name("declarator")
        while at is not None:
            if at.type in (
                "identifier",
                "field_identifier",
                "type_identifier",
                "qualified_identifier",
                "destructor_name",
                "operator_name",
            ):
                return self.text(at).replace(" ", "")
            inner = at.child_by_field_name("declarator")
            at = (
                inner
                if inner is not None
                else next(
                    (one for one in at.named_children if "declarator" in one.type or "identifier" in one.type), None
                )
            )
        return ""

    def _define(self, node: Node, kind: NodeKind, name: str, scope: str) -> str:
        whole = f"{scope}{self.mark}{name}" if scope else name
        label = kind.kind
        if label == "function" and self.language not in _SCRIPTS:
            in_class = node.parent is not None and node.parent.type == "field_declaration_list"
            label = "method" if in_class or self.mark in name else "function"
        if label == "variable" and _is_function(node):
            label = "method"
        doc, doc_line = self._doc(node)
        line, end = node.start_point[0] + 1, node.end_point[0] + 1
        self.definitions.append(Definition(whole, label, line, end, self._signature(node, label), (), doc, doc_line))
        for base in self._bases(node):
            self.bases.append(Base(whole, base, line))
        return whole

    def _signature(self, node: Node, label: str) -> str:
        """The declaration without its body."""
        body = node.child_by_field_name("body")
        end = body.start_byte if body is not None else node.end_byte
        if label == "macro":
            value = node.child_by_field_name("value")
            end = value.start_byte if value is not None else end
        text = " ".join(self.data[node.start_byte : end].decode("utf-8", "replace").split()).rstrip(" {=;:")
        return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"

    def _declared(self, node: Node, scope: str) -> None:
        """A prototype, or a variable of a file or a namespace."""
        if not (name := self._name(node)) or self.mark in name:
            return
        kind = "function" if _is_function(node) else "variable"
        doc, doc_line = self._doc(node)
        whole = f"{scope}{self.mark}{name}" if scope else name
        line, end = node.start_point[0] + 1, node.end_point[0] + 1
        self.definitions.append(Definition(whole, kind, line, end, self._signature(node, kind), (), doc, doc_line))

    def _variable(self, node: Node, scope: str, function: str) -> tuple[str, str]:
        """``const name = …`` at the top of a script: a function if that is its value."""
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name is None or name.type != "identifier" or function:
            return scope, function
        made = value is not None and value.type in ("arrow_function", "function_expression", "generator_function")
        kind = "function" if made else "class" if value is not None and value.type == "class" else "variable"
        doc, doc_line = self._doc(node)
        whole = f"{scope}{self.mark}{self.text(name)}" if scope else self.text(name)
        line, end = node.start_point[0] + 1, node.end_point[0] + 1
        signature = ""
        if made and value is not None:
            signature = f"{whole} = {self._signature(value, kind)}"
        self.definitions.append(Definition(whole, kind, line, end, signature, (), doc, doc_line))
        if value is not None and value.type == "call_expression":
            self.imports += self._required(value, whole)
        return (whole, whole) if kind != "variable" else (scope, function)

    def _doc(self, node: Node) -> tuple[str, int]:
        """The comment right above a definition, and its line."""
        while node.parent is not None and (
            node.parent.type in _WRAPPERS or node.parent.type.endswith("lexical_declaration")
        ):
            node = node.parent
        parts: list[str] = []
        above, line = node.prev_named_sibling, node.start_point[0]
        while above is not None and above.type == "comment" and above.end_point[0] + 1 >= line:
            if above.prev_named_sibling is not None and above.prev_named_sibling.end_point[0] == above.start_point[0]:
                break  # it stands behind something else on its line
            parts.insert(0, self.data[above.start_byte : above.end_byte].decode("utf-8", "replace"))
            line = above.start_point[0]
            above = above.prev_named_sibling
        text = cleaned("\n".join(parts))
        return (text, line + 1) if text else ("", 0)

    def _bases(self, node: Node) -> Iterator[str]:
        for child in node.named_children:
            if child.type == "base_class_clause" and node.type in _CLASSES:
                yield from (self.text(one) for one in child.named_children if one.type.endswith("identifier"))
            elif child.type == "class_heritage":
                for one in child.named_children:
                    found = one.named_children if one.type.endswith("_clause") else [one]
                    yield from (self.text(name) for name in found if "identifier" in name.type)

    # -- calls and imports

    def _call(self, node: Node, function: str) -> None:
        called = node.child_by_field_name("function") or node.child_by_field_name("constructor")
        if called is None:
            return
        name = re.sub(r"<.*", "", self.text(called)).replace("->", ".").replace(" ", "")
        if re.fullmatch(r"[\w$.:~]+", name):
            line = node.start_point[0] + 1
            self.calls.append(Call(name, line, function))

    def _imported(self, node: Node) -> Iterator[Import]:
        line = node.start_point[0] + 1
        if node.type == "preproc_include":
            name = self.text(node.child_by_field_name("path")).strip('"<>')
            yield Import(line, name, 0, "", name, "module")
            return
        module = self.text(node.child_by_field_name("source")).strip("\"'`")
        names = [one for part in node.named_children if part.type == "import_clause" for one in part.named_children]
        if not names and module:
            yield Import(line, module, 0, "", "", "module")
        for one in names:
            if one.type == "named_imports":
                for item in one.named_children:
                    name = self.text(item.child_by_field_name("name"))
                    yield Import(line, module, 0, name, self.text(item.child_by_field_name("alias")) or name, "module")
            elif one.type == "namespace_import":
                yield Import(line, module, 0, "*", self.text(one).rpartition(" ")[2], "module")
            else:
                yield Import(line, module, 0, "default", self.text(one), "module")

    def _required(self, node: Node, bound: str) -> Iterator[Import]:
        match = re.fullmatch(r"require\(\s*[\"'`]([^\"'`]+)[\"'`]\s*\)", self.text(node))
        if match:
            yield Import(node.start_point[0] + 1, match[1], 0, "*", bound, "module")


def _is_function(node: Node) -> bool:
    at = node.child_by_field_name("declarator")
    while at is not None:
        if at.type == "function_declarator":
            return True
        at = at.child_by_field_name("declarator")
    return False
