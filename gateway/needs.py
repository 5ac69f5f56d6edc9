"""What requests need of their models, against what profiles declare of these."""

from __future__ import annotations

from understudy.config import ModelProfile
from understudy.errors import ModelRefused
from understudy.records import ModelRequest

IN_MESSAGES = {"images": (b'"type":"image_url"',), "files": (b'"type":"file"',)}
"""What makes a message need something. It is looked for in JSON text that is not read: in a text, the quotes would be
escaped."""

IN_PARAMETERS = {"response_format": ("response_format",), "reasoning": ("reasoning", "reasoning_effort", "thinking")}


def require(profile: ModelProfile, request: ModelRequest) -> None:
    """Refuse a request that needs what its model can't do, as its profile declares it.

    Raises:
        ModelRefused: with what is missing, and as the endpoint would refuse it: an agent's output is asked for in
            another form then.
    """
    declared = profile.capabilities.get(request.model) or profile.capabilities.get("*")
    if declared is None:
        return
    needed = {name for name, marks in IN_MESSAGES.items() if any(mark in request.messages for mark in marks)}
    needed |= {name for name, names in IN_PARAMETERS.items() if any(one in request.parameters for one in names)}
    if request.tools:
        needed.add("tools")
    missing = sorted(name for name in needed if not getattr(declared, name))
    if missing:
        raise ModelRefused(
            f"the request needs {', '.join(missing)}, which profile {profile.name!r} declares {request.model!r} not to "
            "have. Name another model, leave it out, or correct the profile's capabilities",
            details={"status": 400, "missing": missing, "profile": profile.name},
        )
