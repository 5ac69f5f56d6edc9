"""All that manifests are checked for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from . import kuberay, network, ours, schemas
from .objects import Manifest

PROVIDED: Mapping[str, frozenset[str]] = MappingProxyType(
    {"understudy": frozenset({"store", "openai-api-key", "redis-password"})}
)
"""The Secret that docs/kubernetes.md has people make."""


def check_manifests(documents: list[Manifest], provided: Mapping[str, frozenset[str]] = PROVIDED) -> list[str]:
    """What is wrong with manifests that are applied together: by their schemas, by the operator's own rules, by ours,
    and by what the network policies let through. Empty: nothing."""
    found = schemas.findings(documents)
    # The other rules may take the documents to be what their schemas say.
    return found or [
        *kuberay.findings(documents),
        *ours.findings(documents, provided),
        *network.findings(documents),
    ]
