"""Strict models: what users write is refused with all that is wrong with it at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import InvalidSpec
from .problem_texts import described
from .suggestions import did_you_mean

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
"""Name of an environment variable."""

TAGS = ONE, SEVERAL, AGENT, BY_NAME, DIRECTORY, WORKTREE = (
    "(one)", "(several)", "(agent)", "(by name)", "(directory)", "(worktree)",
)  # fmt: skip
"""Which of several forms a value has: a part of pydantic's places, and of none that users see."""

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class _AllProblems(ModelMetaclass):
    """Turns pydantic's error into ours at the outermost call only: nested models must report to the outer one."""

    POSITIONAL: tuple[str, ...]

    def __call__(cls, *args: Any, **data: Any) -> Any:
        try:
            named = dict(zip(cls.POSITIONAL, args, strict=False))
            return super().__call__(*args[len(named) :], **named, **data)
        except ValidationError as error:
            found = problems(error, cls)
            raise InvalidSpec(described(cls.__name__, found), details={"problems": found}) from None


class Strict(BaseModel, metaclass=_AllProblems):
    """A frozen model that refuses unknown fields and tells all problems at once.

    Attributes:
        POSITIONAL: fields that may be given without their names.
    """

    POSITIONAL: ClassVar[tuple[str, ...]] = ()
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


def problems(error: ValidationError, model: Any) -> list[dict[str, str]]:
    """Every problem as `{"field", "problem"}`, in the order of the fields; `model` is what was to be made."""
    found = []
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        place, problem = item["loc"], item["msg"]
        if item["type"] == "extra_forbidden":
            problem = f"there is no such field{did_you_mean(str(place[-1]), _fields_at(model, place[:-1]))}"
        field = ".".join(str(part) for part in place if part not in TAGS) or "(whole)"
        found.append({"field": field, "problem": problem})
    return found


def _fields_at(model: Any, place: tuple[int | str, ...]) -> list[str]:
    """The fields of the model at this place in another one."""
    for part in place:
        if isinstance(part, str) and part not in TAGS:
            model = next(_models_in(model.model_fields[part].annotation), None)
            if model is None:
                return []
    return list(model.model_fields)


def _models_in(annotation: Any) -> Iterator[Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)
