"""Label, field and node selectors."""

from __future__ import annotations

from typing import Any


def matches_labels(item: dict[str, Any], selector: str) -> bool:
    """Whether an object has the labels of `a=b,c!=d`."""
    labels = item["metadata"].get("labels") or {}
    for term in filter(None, selector.split(",")):
        key, unequal, value = term.partition("!=")
        if unequal:
            if labels.get(key) == value:
                return False
            continue
        key, _, value = term.replace("==", "=").partition("=")
        if labels.get(key) != value:
            return False
    return True


def matches_fields(item: dict[str, Any], selector: str) -> bool:
    """Whether an object has the fields of `metadata.name=x,spec.nodeName=y`."""
    for term in filter(None, selector.split(",")):
        path, _, value = term.replace("==", "=").partition("=")
        here: Any = item
        for step in path.split("."):
            here = (here or {}).get(step)
        if str(here or "") != value:
            return False
    return True


def matches_node(node: dict[str, Any], selector: dict[str, Any] | None) -> bool:
    """Whether a node is among those of a NodeSelector; None selects all."""
    if selector is None:
        return True
    return any(_matches_term(node, term) for term in selector["nodeSelectorTerms"])


def _matches_term(node: dict[str, Any], term: dict[str, Any]) -> bool:
    labels = node["metadata"].get("labels") or {}
    fields = {"metadata.name": node["metadata"]["name"]}
    expressions = term.get("matchExpressions") or ()
    field_expressions = term.get("matchFields") or ()
    if not expressions and not field_expressions:
        return False
    return all(_holds(labels, e) for e in expressions) and all(
        _holds(fields, e) for e in field_expressions
    )


def _holds(values: dict[str, str], expression: dict[str, Any]) -> bool:
    value = values.get(expression["key"])
    if expression["operator"] == "In":
        return value in expression["values"]
    if expression["operator"] == "NotIn":
        return value not in expression["values"]
    if expression["operator"] == "Exists":
        return value is not None
    return value is None
