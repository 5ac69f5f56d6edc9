"""What the fields of a definition are for, from the docstrings of `steps`: for problems, and for editors."""

from __future__ import annotations

import re
from functools import cache

from .steps import Part

_FIELD = re.compile(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", re.MULTILINE)


@cache
def meaning_of(part: type[Part]) -> str:
    """What a part is for."""
    return (part.__doc__ or "").partition("\n\n    Attributes:")[0].replace("\n    ", " ")


@cache
def meanings(part: type[Part]) -> dict[str, str]:
    """What its fields are for, by their names in a definition."""
    names = dict(zip(part.__struct_fields__, part.__struct_encode_fields__, strict=True))
    found = dict(_FIELD.findall(part.__doc__ or ""))
    return {names[name]: re.sub(r"\s+", " ", text) for name, text in found.items() if name in names}
