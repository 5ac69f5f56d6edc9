"""The manifest that is made of a file which others use, too: the alert rules."""

from __future__ import annotations

import yaml

from .objects import KUBERNETES

PATH = KUBERNETES / "base" / "prometheusrule.yaml"
SOURCE = KUBERNETES.parent / "observability" / "dashboards" / "alerts.yaml"
HEADER = f"# Generated of {SOURCE.relative_to(KUBERNETES.parent)}: scripts/manifests --write\n"


def generated() -> str:
    """What the file must hold."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "understudy", "labels": {"app.kubernetes.io/part-of": "understudy"}},
        "spec": yaml.safe_load(SOURCE.read_text()),
    }
    return HEADER + yaml.safe_dump(rule, sort_keys=False, width=120, allow_unicode=True)
