"""All that manifests are checked for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from . import console, kuberay, network, ours, schemas
from .objects import Manifest

PROVIDED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "understudy": frozenset({"store", "openai-api-key", "redis-password", "auth_token"}),
        "understudy-console": frozenset({"proxy-secret", "cookie-secret", "client-secret"}),
    }
)
"""The Secrets that docs/kubernetes.md has people make."""


def check_manifests(
    documents: list[Manifest],
    provided: Mapping[str, frozenset[str]] = PROVIDED,
    operators: tuple[str, ...] = schemas.OPERATORS,
) -> list[str]:
    """What is wrong with manifests that are applied together: by their schemas, by the operator's own rules, by ours,
    and by what the network policies let through. Empty: nothing.

    Args:
        provided: Secrets that are made by hand, with their keys.
        operators: The versions of KubeRay that must take them.
    """
    found = schemas.findings(documents, operators)
    # The other rules may take the documents to be what their schemas say.
    return found or [
        *kuberay.findings(documents),
        *ours.findings(documents, provided),
        *network.findings(documents),
        *console.findings(documents),
    ]
