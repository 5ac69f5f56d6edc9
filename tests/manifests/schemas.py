"""Manifests against schemas, without a cluster: core kinds strictly, ours by their custom resource definitions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
from jsonschema import Draft202012Validator
from kubernetes_validate.utils import SchemaNotFoundError, ValidationError

from .objects import Manifest, named

FOLDER = Path(__file__).parent.parent / "schemas"
"""`KIND.VERSION.json`, or one for each supported version of the operator: `KIND.VERSION.OPERATOR-1.2.json`. See the
README there."""

KUBERNETES = "1.32"
OPERATORS = ("1.6", "1.7")
"""Versions of KubeRay."""


def findings(documents: list[Manifest], operators: tuple[str, ...] = OPERATORS) -> list[str]:
    """What a server would refuse, or drop silently: wrong types, unknown and missing fields. With several versions of
    an operator, what the server of any of them would."""
    found = []
    for document in documents:
        found += [f"{named(document)}: {problem}" for problem in _known(json.dumps(document), operators)]
    return found


@cache
def _known(document: str, operators: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_problems(json.loads(document), operators))


def _problems(document: Manifest, operators: tuple[str, ...]) -> Iterator[str]:
    version = str(document.get("apiVersion", ""))
    schemas = custom(str(document.get("kind", "")), version, operators)
    for origin, schema in schemas.items():
        for error in sorted(schema.iter_errors(document), key=lambda error: list(map(str, error.path))):
            yield f"{origin}{'.'.join(map(str, error.path))}: {error.message[:200]}"
    if schemas:
        return
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except ValidationError as error:
        yield f"{'.'.join(map(str, error.path))}: {error.message[:200]}"
    except SchemaNotFoundError:
        yield f"nobody knows the kind {document.get('kind')} of {version}"


@cache
def custom(kind: str, version: str, operators: tuple[str, ...] = OPERATORS) -> dict[str, Draft202012Validator]:
    """The schemas of a custom resource, as a structural schema is meant: what it does not name is refused. By how
    findings begin that come of them: `kuberay-1.6: `."""
    name = f"{kind}.{version.replace('/', '_')}"
    origins = {"": f"{name}.json", **{f"kuberay-{one}: ": f"{name}.kuberay-{one}.json" for one in operators}}
    return {
        origin: Draft202012Validator(_closed(json.loads((FOLDER / file).read_text()), root=True))
        for origin, file in origins.items()
        if (FOLDER / file).exists()
    }


def _closed(schema: Any, *, root: bool = False) -> Any:
    """A structural schema in JSON Schema's words."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        key: {name: _closed(item) for name, item in value.items()} if key == "properties" else _closed(value)
        for key, value in schema.items()
        if key != "format"
    }
    if schema.get("x-kubernetes-int-or-string"):
        closed["type"] = ["integer", "string"]
    if schema.get("nullable") and isinstance(closed.get("type"), str):
        closed["type"] = [closed["type"], "null"]
    free = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if "properties" in schema and not free:
        if root:  # the API server's own: every schema leaves out what every object has
            closed["properties"] |= {"metadata": {"type": "object"}, "apiVersion": {}, "kind": {}}
        closed["additionalProperties"] = False
    return closed
