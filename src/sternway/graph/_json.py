"""A graph as JSON and back. docs/graph_json.md describes the format; fields with their default value are left out."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from sternway.errors import GraphError
from sternway.graph._records import Node, Parameter, Saved, SplitPreview, TensorInfo, Waiting
from sternway.graph._snapshot import Graph

FORMAT, VERSION = "sternway.graph", 1


def to_record(graph: Graph) -> dict[str, Any]:
    """The graph as dictionaries, lists, strings and numbers. Each tensor description is listed once, in a table."""
    tensors: dict[TensorInfo, int] = {}

    def number(info: TensorInfo) -> int:
        return tensors.setdefault(info, len(tensors))

    def plain(record: Saved | Node) -> dict[str, Any]:
        usual = record._field_defaults
        return {name: value for name, value in record._asdict().items() if name not in usual or value != usual[name]}

    nodes = []
    for node in graph.nodes:
        record = plain(node)
        record["outputs"] = [number(info) for info in node.outputs]
        record["inputs"] = [None if info is None else number(info) for info in node.inputs]
        if node.saved:
            record["saved"] = [plain(saved) | {"tensor": number(saved.tensor)} for saved in node.saved]
        del record["id"]  # its index in the list
        nodes.append(record)
    parameters = graph.parameters and [_fields(each) | {"tensor": number(each.tensor)} for each in graph.parameters]
    return {
        "format": FORMAT,
        "version": VERSION,
        "torch": graph.torch,
        "saved_bytes": graph.saved_bytes,
        "roots": graph.roots,
        "nodes": nodes,
        "parameters": parameters,
        "classes": dict(graph.classes),
        "split": {
            "waits": [_fields(wait) for wait in graph.split.waits],
            "ready": graph.split.ready,
            "refused": graph.split.refused,
        },
        "tensors": [[info.shape, info.dtype, info.device] for info in tensors],
    }


def _fields(record: Parameter | Waiting) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def to_json(graph: Graph) -> str:
    return json.dumps(to_record(graph), separators=(",", ":"), ensure_ascii=False)


def from_json(text: str) -> Graph:
    """Read back what ``Graph.to_json`` wrote.

    Example:
        >>> from sternway import graph
        >>> g = graph.capture(torch.ones(2, requires_grad=True).exp().sum())
        >>> graph.from_json(g.to_json()) == g
        True

    Raises:
        GraphError: ``text`` was not written by ``Graph.to_json``, or by another version of the format.
    """
    GraphError.unless(isinstance(text, str), "text must be a string", text, "pass what Graph.to_json wrote")
    try:
        record = json.loads(text)
        found = (record["format"], record["version"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise GraphError(
            "text must be what Graph.to_json wrote", got=repr(text[:40]), fix="pass that text unchanged"
        ) from error
    if found != (FORMAT, VERSION):
        raise GraphError(
            f"this release of sternway can only read {FORMAT} version {VERSION}",
            got=f"{found[0]} version {found[1]}",
            fix="write the file again with this release, or read it with the one that wrote it",
        )
    try:
        return _graph(record)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise GraphError(
            "text must be what Graph.to_json wrote",
            got=f"a damaged record: {type(error).__name__}: {error}",
            fix="pass that text unchanged",
        ) from error


def _graph(record: dict[str, Any]) -> Graph:
    infos = [
        TensorInfo(None if shape is None else tuple(shape), dtype, device) for shape, dtype, device in record["tensors"]
    ]
    nodes = tuple(_node(index, fields_of, infos) for index, fields_of in enumerate(record["nodes"]))
    parameters = record["parameters"]
    return Graph(
        nodes=nodes,
        roots=tuple((node, output) for node, output in record["roots"]),
        parameters=None
        if parameters is None
        else tuple(Parameter(**each | {"tensor": infos[each["tensor"]]}) for each in parameters),
        split=SplitPreview(
            tuple(Waiting(**wait | {"parameters": tuple(wait["parameters"])}) for wait in record["split"]["waits"]),
            tuple(record["split"]["ready"]),
            record["split"]["refused"],
        ),
        torch=record["torch"],
        classes=tuple(record.get("classes", {}).items()),
    )


def _node(index: int, record: dict[str, Any], infos: list[TensorInfo]) -> Node:
    changed = {
        "outputs": tuple(infos[number] for number in record["outputs"]),
        "inputs": tuple(None if number is None else infos[number] for number in record["inputs"]),
        "next": tuple(None if target is None else (target[0], target[1]) for target in record["next"]),
        "saved": tuple(Saved(**saved | {"tensor": infos[saved["tensor"]]}) for saved in record.get("saved", ())),
        "hooks": tuple(record.get("hooks", ())),
    }
    return Node(id=index, **record | changed)
