"""YAML, TOML and JSON: the dotted path of each key, and its line."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import yaml

from sternway.atlas._records import Facts, Keyword, Option
from sternway.atlas.read._words import WordIndex

_JSON = re.compile(r'"((?:[^"\\]|\\.)*)"|[{}\[\],:]|\n')
_TOML_KEY = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
_TOML_LINE = re.compile(
    rf"\s*(?:\[\[?\s*(?P<table>{_TOML_KEY}(?:\s*\.\s*{_TOML_KEY})*)\s*\]|(?P<key>{_TOML_KEY}(?:\s*\.\s*{_TOML_KEY})*)\s*=)"
)
_DEPTH = 200


def read_keys(text: str, language: str) -> tuple[Facts, list[Keyword]]:
    """Facts and keywords of a configuration file; ValueError if it cannot be parsed."""
    try:
        found = list({"YAML": _yaml, "TOML": _toml, "JSON": _json}[language](text))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error).partition("\n")[0]) from None
    options = tuple(Option("key", name, line, value, ()) for name, line, value in dict.fromkeys(found))
    words = WordIndex()
    words.add(text, 1)
    kinds: dict[str, list[int]] = {}
    for name, line, _ in found:
        kinds.setdefault(name.rpartition(".")[2], []).append(line)
    names = [
        Keyword(name, "key", lines[0], tuple(sorted({*lines} - {lines[0]}))) for name, lines in kinds.items() if name
    ]
    keywords = [*names, *(word for word in words.keywords() if word.name not in kinds)]
    return Facts(language, "keys", options=options), sorted(
        keywords, key=lambda word: (word.name.casefold(), word.name)
    )


def _short(value: str) -> str:
    value = " ".join(value.split())
    return value if len(value) <= 60 else value[:59] + "…"


def _yaml(text: str) -> Iterator[tuple[str, int, str]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for document in yaml.compose_all(text, Loader=loader):
        yield from _yaml_node(document, "", set())


def _yaml_node(node: Any, path: str, seen: set[int]) -> Iterator[tuple[str, int, str]]:
    if id(node) in seen or path.count(".") > _DEPTH:  # aliases may form a cycle
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                name = f"{path}.{key.value}" if path else str(key.value)
                yield name, key.start_mark.line + 1, _short(value.value) if isinstance(value, yaml.ScalarNode) else ""
                yield from _yaml_node(value, name, seen)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _yaml_node(item, path, seen)


def _toml(text: str) -> Iterator[tuple[str, int, str]]:
    """tomllib gives no line numbers: keys are matched line by line, and kept if tomllib found them too."""
    known = set(_paths(tomllib.loads(text), ""))
    table = ""
    for number, row in enumerate(text.split("\n"), 1):
        match = _TOML_LINE.match(row)
        if match is None:
            continue
        parts = [part.strip("\"'") for part in re.findall(_TOML_KEY, match["table"] or match["key"])]
        name = ".".join(parts if match["table"] else [*filter(None, [table]), *parts])
        if name in known:
            if match["table"]:
                table = name
            yield name, number, "" if match["table"] else _short(row[match.end() :])


def _paths(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            name = f"{path}.{key}" if path else key
            yield name
            yield from _paths(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _paths(inner, path)


def _json(text: str) -> Iterator[tuple[str, int, str]]:
    json.loads(text)
    path: list[str] = []
    objects: list[bool] = []
    line, last, last_line, is_key = 1, "", 1, False
    for match in _JSON.finditer(text):
        token = match[0]
        if token == "\n":
            line += 1
        elif token in "{[":
            objects.append(token == "{")
            path.append("")
        elif token in "}]":
            objects.pop()
            path.pop()
        elif token == ":" and is_key and objects and objects[-1]:
            path[-1] = json.loads(f'"{last}"')
            yield ".".join(part for part in path if part), last_line, _json_value(text, match.end())
        if match[1] is not None:
            last, last_line, is_key = match[1], line, True
        elif token not in ("\n", ":"):
            is_key = False


def _json_value(text: str, start: int) -> str:
    match = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[-\w.+]+)').match(text, start)
    return _short(match[1]) if match else ""
