"""Tools: what `@tool` makes of a function, how it reaches a frame, and how one call of it ends."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import enum
import functools
import io
import json
import marshal
import math
import pickle
import re
import subprocess
import sys
import threading
import types
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from understudy.actors import execution
from understudy.actors.execution import MAX_RESULT_CHARACTERS, THREAD_PREFIX, Outcome, bind
from understudy.actors.tools import (
    BUILTIN_TOOLS,
    TOOL_GROUPS,
    LoadedTool,
    ToolContext,
    ToolDefinition,
    describe,
    load,
    tool,
    tool_names,
)
from understudy.errors import InvalidSpec, ToolError

CONTEXT = ToolContext(session_id="s", run_id="r", round=1, call_id="r/1/0", epoch=2, agent="lead")


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    y: int = 2


class Box(BaseModel):
    corner: Point
    color: Color = Color.RED


class Report(TypedDict):
    name: str
    boxes: list[Box]


class Named(NamedTuple):
    number: int
    color: Color


@dataclasses.dataclass
class Holder:
    held: dict[int, Box]


def find_out(context: ToolContext) -> str:
    return f"found {context.call_key}"


@tool
def lookup(city: str, context: ToolContext, days: int = 3, unit: Literal["c", "f"] = "c") -> str:
    """Look the weather up.

    In a second paragraph, more of it.

    Args:
        city: Name of the city,
            or of a village.
        days (int): How many days.

    Returns:
        The weather.
    """
    return f"{city} {days} {unit} {context.call_key}"


@tool(name="paint_it", description="Paints.", on_crash=find_out, timeout=5)
async def paint(color: Color, points: list[Point], box: Box | None = None) -> str:
    return f"{color!r} {points!r} {box!r}"


def run(function: Any, arguments: str | dict[str, Any] = "{}", timeout: float = 30.0) -> Any:
    """Execute one call of a decorated function as a frame does."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return execute(loaded(function), text, CONTEXT, timeout)


async def execute(tool: LoadedTool, arguments: str, context: ToolContext, timeout: float) -> Outcome:
    """Bind and execute one call, whatever time it is."""
    bound = bind(tool, arguments, context)
    outcome = bound if isinstance(bound, Outcome) else await execution.execute(tool, bound, timeout)
    assert outcome is not None
    return outcome


def loaded(function: Any) -> LoadedTool:
    specs, blobs = describe(function, pickle=dumps)
    return load(json.loads(json.dumps(specs[0])), blobs.__getitem__, loads)


def dumps(value: Any) -> bytes:
    """A small stand-in for cloudpickle: functions by value, classes by reference."""

    class ByValue(pickle.Pickler):
        def reducer_override(self, item: Any) -> Any:
            if not isinstance(item, types.FunctionType) or "<locals>" not in item.__qualname__:
                return NotImplemented
            cells = tuple(cell.cell_contents for cell in item.__closure__ or ())
            parts = (marshal.dumps(item.__code__), item.__name__, item.__defaults__, cells, item.__annotations__)
            return rebuild, (*parts, item.__kwdefaults__, item.__doc__), item.__dict__

    buffer = io.BytesIO()
    ByValue(buffer).dump(value)
    return buffer.getvalue()


def rebuild(
    code: bytes, name: str, defaults: Any, cells: Any, annotations: Any, kwdefaults: Any, doc: str | None
) -> types.FunctionType:
    closure = tuple(types.CellType(value) for value in cells)
    function = types.FunctionType(marshal.loads(code), globals(), name, defaults, closure)
    function.__annotations__, function.__kwdefaults__, function.__doc__ = annotations, kwdefaults, doc
    return function


loads = pickle.loads


class TestDefinition:
    def test_decorated_function_stays_itself(self) -> None:
        """`@tool` returns the function, callable as before, and attaches its definition."""
        assert isinstance(lookup.__understudy_tool__, ToolDefinition)
        assert lookup("Bern", CONTEXT) == "Bern 3 c s/r/1/0"
        assert paint.__understudy_tool__.name == "paint_it"

    def test_schema_comes_from_signature_and_docstring(self) -> None:
        """Types, defaults and Google style descriptions make the schema; the context is not in it."""
        assert lookup.__understudy_tool__.schema == {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city, or of a village."},
                "days": {"type": "integer", "description": "How many days.", "default": 3},
                "unit": {"enum": ["c", "f"], "type": "string", "default": "c"},
            },
            "required": ["city"],
            "additionalProperties": False,
        }
        assert lookup.__understudy_tool__.description == "Look the weather up.\n\nIn a second paragraph, more of it."

    def test_parameter_names_of_pydantic_are_free(self) -> None:
        """Parameters may be called what a pydantic model reserves."""

        @tool
        def odd(schema: str, json: int, model_config: bool, _hidden: str = "") -> str:
            return ""

        assert set(odd.__understudy_tool__.schema["properties"]) == {"schema", "json", "model_config", "_hidden"}

    def test_default_that_json_cannot_show_is_left_out(self) -> None:
        """A default without JSON form neither fails nor warns; the parameter is optional all the same."""

        @tool
        def odd(value: Any = object()) -> str:  # noqa: B008
            return ""

        assert odd.__understudy_tool__.schema["properties"] == {"value": {}}
        assert odd.__understudy_tool__.schema["required"] == []

    @pytest.mark.parametrize("annotation", ["ToolContext", "tools.ToolContext", "ToolContext | None", ToolContext])
    def test_context_is_known_by_any_annotation(self, annotation: Any) -> None:
        """The class, its name as text, and the name within a module all mark the context's parameter."""

        def plain(context: Any) -> str:
            return ""

        plain.__annotations__["context"] = annotation
        assert loaded(tool(plain)).context_parameter == "context"

    @pytest.mark.parametrize(
        "options",
        [{"name": "has space"}, {"name": ""}, {"on_crash": "maybe"}, {"timeout": 0}, {"timeout": float("nan")}],
    )
    def test_impossible_options_are_refused_at_once(self, options: dict[str, Any]) -> None:
        """A wrong name, crash policy or timeout fails where the tool is defined."""
        with pytest.raises(InvalidSpec):
            tool(**options)(lambda: "")

    def test_functions_that_cannot_be_called_by_name_are_refused(self) -> None:
        """Positional-only and variadic parameters, generators, and unresolvable annotations give no schema."""

        def positional(a: int, /) -> None: ...
        def variadic(*a: int) -> None: ...
        def keywords(**a: int) -> None: ...
        def generator() -> Any:
            yield 1

        def unresolvable(a: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821

        for function in (positional, variadic, keywords, generator, unresolvable):
            with pytest.raises(InvalidSpec, match=function.__name__):
                _ = tool(function).__understudy_tool__.schema


class TestDescribe:
    def test_importable_function_is_referred_to(self) -> None:
        """A module's function needs no serializer; the specification is plain JSON."""
        specs, blobs = describe(lookup, pickle=None)
        assert blobs == {}
        assert specs == json.loads(json.dumps(specs))
        assert specs[0]["source"] == {"import": f"{__name__}:lookup"}
        assert set(specs[0]) == {"name", "description", "parameters", "on_crash", "timeout", "source", "code"}

    def test_local_function_travels_by_value(self) -> None:
        """A closure is stored under the hash of its serialization, and runs after a round trip."""
        factor = 7

        @tool
        def times(n: int) -> int:
            return n * factor

        specs, blobs = describe(times, pickle=dumps)
        assert specs[0]["source"] == {"blob": next(iter(blobs))}
        back = load(specs[0], blobs.__getitem__, loads)
        assert back.function is not times
        assert back.function(n=3) == 21

    def test_serialization_does_not_depend_on_what_was_read_before(self) -> None:
        """A tool used by another one serializes the same before and after its own schema was asked for."""
        inner = tool(name="inner")(lambda: "")

        @tool
        def outer() -> str:
            return str(inner())

        before = describe(outer, pickle=dumps)[1]
        assert inner.__understudy_tool__.schema  # type: ignore[attr-defined]
        assert describe(outer, pickle=dumps)[1] == before

    def test_by_value_can_be_switched_off(self) -> None:
        """Without a serializer a local function is refused, and without a deserializer it is not run."""
        local = tool(name="local")(lambda: "")
        with pytest.raises(InvalidSpec, match="switched off"):
            describe(local, pickle=None)
        specs, blobs = describe(local, pickle=dumps)
        with pytest.raises(ToolError, match="switched off"):
            load(specs[0], blobs.__getitem__, None)

    def test_serializer_failure_is_an_invalid_spec(self) -> None:
        """What can't be serialized is reported in the driver, with the tool's name."""
        lock = threading.Lock()
        local = tool(name="local")(lambda: lock)
        with pytest.raises(InvalidSpec, match="local"):
            describe(local, pickle=dumps)

    def test_local_dataclass_is_refused(self) -> None:
        """A dataclass that can't be imported would lose its defaults on the way: refused in the driver."""

        @dataclasses.dataclass
        class Local:
            x: int = 1

        def local(value: Any) -> str:
            return ""

        local.__annotations__["value"] = list[Local]
        with pytest.raises(InvalidSpec, match="dataclass"):
            describe(tool(local), pickle=dumps)

    def test_methods_and_wrapped_functions_are_called_as_given(self) -> None:
        """A bound method loses `self`; a decorator around a tool is not bypassed."""

        class Shop:
            @tool
            def price(self, item: str) -> str:
                return item

        @functools.wraps(lookup)
        def logged(*args: Any, **keywords: Any) -> str:
            return "logged " + lookup(*args, **keywords)

        assert set(describe(Shop().price, pickle=lambda _: b"")[0][0]["parameters"]["properties"]) == {"item"}
        specs, _ = describe(logged, pickle=lambda _: b"")
        assert "blob" in specs[0]["source"]

    @pytest.mark.parametrize(
        ("item", "names"),
        [
            ("files", ["read_file", "write_file", "edit_file", "apply_patch", "glob", "grep"]),
            ("explore", ["read_file", "glob", "grep"]),
            ("history", ["recall", "read_message"]),
            ("bash", ["bash"]),
            ("spawn_agent", ["spawn_agent"]),
        ],
    )
    def test_built_in_names_and_groups(self, item: str, names: list[str]) -> None:
        """A name stands for itself, a group for its members, in order; sources name the built-in."""
        specs, blobs = describe(item, pickle=None)
        assert [spec["name"] for spec in specs] == names
        assert [spec["source"] for spec in specs] == [{"builtin": name} for name in names]
        assert all(spec["description"] and "context" not in spec["parameters"]["properties"] for spec in specs)
        assert blobs == {}

    def test_presets_are_together_what_their_parts_are(self) -> None:
        """`explore` reads only; `core` works on files; `full` has every tool that a name is enough for, once."""
        names = {group: [spec["name"] for spec in describe(group, pickle=None)[0]] for group in TOOL_GROUPS}
        assert {"bash", "apply_patch", "todo", "request_user_input"} < {*names["core"]} < {*names["full"]}
        left_out = {*tool_names()} - {*TOOL_GROUPS} - {*names["full"]}
        assert left_out == {"web_fetch", "view_image", "load_skill", *names["board"], *names["workflows"]}
        assert all(len(found) == len({*found}) for found in names.values())

    def test_unknown_entries_are_refused(self) -> None:
        """An unknown name says which was meant, or where all are; an undecorated function says what it lacks."""
        with pytest.raises(InvalidSpec, match=r"'bsh' \(did you mean 'bash'\?\).*understudy tools"):
            describe("bsh", pickle=None)
        with pytest.raises(InvalidSpec, match="@tool"):
            describe(find_out, pickle=None)


class TestLoad:
    def test_every_built_in_loads(self) -> None:
        """Each entry of the table is a decorated function."""
        for name in BUILTIN_TOOLS:
            assert load(describe(name, pickle=None)[0][0], dict.__getitem__, None).name == name  # type: ignore[arg-type]

    def test_definition_reaches_the_frame(self) -> None:
        """Async and the reconciling function are found again; the context's parameter too."""
        back = loaded(paint)
        assert (back.name, back.is_async, back.reconcile) == ("paint_it", True, find_out)
        assert loaded(lookup).context_parameter == "context"

    def test_specification_wins_over_changed_code(self) -> None:
        """Code that became `reconcile` since does not widen a stored `report`; a lost reconcile finds nothing out."""
        spec = describe(paint, pickle=None)[0][0]
        assert load({**spec, "on_crash": "report"}, {}.__getitem__, None).reconcile is None
        plain = describe(lookup, pickle=None)[0][0]
        assert load({**plain, "on_crash": "reconcile"}, {}.__getitem__, None).reconcile is None

    @pytest.mark.parametrize(
        "source",
        [
            {"import": "no_such_module:f"},
            {"import": "json:no_such_name"},
            {"import": "os:system"},
            {"builtin": "spawn_agent"},
            {"blob": "0" * 64},
        ],
    )
    def test_failure_is_a_tool_error_that_names_the_tool(self, source: dict[str, str]) -> None:
        """Missing modules, names and blobs, and anything not decorated, are one typed error."""
        spec = {**describe(lookup, pickle=None)[0][0], "source": source}
        with pytest.raises(ToolError, match="lookup"):
            load(spec, {}.__getitem__, loads)

    def test_blob_that_does_not_match_its_hash_is_not_unpickled(self) -> None:
        """Stored code is checked before it is run."""
        spec = {**describe(lookup, pickle=None)[0][0], "source": {"blob": "0" * 64}}
        with pytest.raises(ToolError, match="hash"):
            load(spec, lambda _: b"other", lambda _: pytest.fail("unpickled"))

    def test_frames_stay_lean(self) -> None:
        """Importing and running tools brings in neither pydantic nor a model client, a store or Ray."""
        spec = describe("read_file", pickle=None)[0][0]
        code = f"""
import asyncio, sys
from understudy.actors import execution, files, shell, tools
context = tools.ToolContext(session_id="s", run_id="r", round=1, call_id="c", epoch=1, agent="a", workspace="/")
loaded = tools.load({spec!r}, None, None)
keywords = execution.bind(loaded, '{{"path": "etc"}}', context)
outcome = asyncio.run(execution.execute(loaded, keywords, 10.0))
assert "directory" in outcome.content, outcome
print([name for name in ("pydantic", "openai", "sqlmodel", "ray") if name in sys.modules])
"""
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
        assert result.stdout.strip() == "[]"


class TestArguments:
    async def test_context_and_defaults_are_filled_in(self) -> None:
        """The call key is stable and injected; missing optional arguments take their defaults."""
        assert (await run(lookup, {"city": "Bern"})).content == "Bern 3 c s/r/1/0"

    async def test_whole_number_with_a_point_is_an_integer(self) -> None:
        """JSON has one kind of number: 2.0 reaches an `int` parameter as 2."""
        assert (await run(lookup, {"city": "Bern", "days": 2.0})).content == "Bern 2 c s/r/1/0"

    async def test_annotations_are_built(self) -> None:
        """Enums, dataclasses and models arrive as such, nested too."""
        outcome = await run(paint, {"color": "red", "points": [{"x": 1}], "box": {"corner": {"x": 3}}})
        corner = "Box(corner=Point(x=3, y=2), color=<Color.RED: 'red'>)"
        assert outcome.content == f"<Color.RED: 'red'> [Point(x=1, y=2)] {corner}"

    async def test_constraints_that_only_pydantic_knows_are_the_models_mistake(self) -> None:
        """What passes the schema and fails the type is invalid, not an error."""

        def even(n: Any) -> str:
            return "no"

        class Even(BaseModel):
            n: int = Field(multiple_of=2)

        even.__annotations__["n"] = Even
        spec = describe(tool(even), pickle=lambda _: b"")[0][0]
        loose = LoadedTool("even", even, False, {**spec["parameters"], "$defs": {"Even": {}}})
        object.__setattr__(loose, "converted", {"n": Even})
        outcome = await execute(loose, '{"n": {"n": 3}}', CONTEXT, 10)
        assert outcome.outcome == "invalid"
        assert "multiple of 2" in outcome.content

    async def test_all_mistakes_are_listed_and_nothing_runs(self) -> None:
        """The observation names each argument that is wrong, missing or unknown."""
        outcome = await run(lookup, {"days": "x", "unit": "k", "extra": 1})
        assert outcome.outcome == "invalid"
        for part in ("city", "$.days", "$.unit", "extra", "Nothing was executed"):
            assert part in outcome.content

    async def test_unreadable_arguments_become_an_observation(self) -> None:
        """The model sees the parser's message and what to do."""
        outcome = await run(lookup, '{"city": ')
        assert outcome.outcome == "invalid"
        assert "line 1 column 10" in outcome.content
        assert "valid JSON" in outcome.content

    async def test_empty_text_means_no_arguments(self) -> None:
        """Endpoints send an empty text for a call without arguments."""
        assert (await run(tool(name="now")(lambda: "noon"), "")).content == "noon"

    @settings(max_examples=300, deadline=None)
    @given(st.text() | st.sampled_from(["[" * 50_000, "9" * 5_000, "NaN", '{"x": 1e999}', '{"x": "\\ud800"}', "null"]))
    def test_any_text_gives_an_outcome(self, text: str) -> None:
        """No argument text, however broken, makes `execute` raise."""
        outcome = asyncio.run(run(echo, text))
        assert outcome.outcome in ("ok", "invalid")
        outcome.content.encode()

    @pytest.mark.thorough
    @settings(max_examples=200, deadline=None)
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["x", "y", "z"]), inner),
        )
    )
    def test_any_json_gives_an_outcome(self, value: Any) -> None:
        """Valid JSON of any shape is either run or refused; what comes back can be stored."""
        outcome = asyncio.run(run(echo, json.dumps(value)))
        assert outcome.outcome in ("ok", "invalid")
        assert "\0" not in outcome.content
        outcome.content.encode()


@tool
async def echo(x: Any = None, y: int = 0) -> Any:
    return x


class TestResults:
    async def test_text_as_it_is_and_everything_else_as_json(self) -> None:
        """Strings are not quoted; other values are JSON."""
        assert (await run(tool(name="t")(lambda: "Grüße"))).content == "Grüße"
        assert (await run(tool(name="t")(lambda: {"a": [1, None, "ü"]}))).content == '{"a": [1, null, "ü"]}'

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (Point(1), '{"x": 1, "y": 2}'),
            (Box(corner=Point(1)), '{"corner": {"x": 1, "y": 2}, "color": "red"}'),
            ([Point(1), Box(corner=Point(2))], '[{"x": 1, "y": 2}, {"corner": {"x": 2, "y": 2}, "color": "red"}]'),
            (Report(name="a", boxes=[Box(corner=Point(1))]), '{"name": "a", "boxes": [{"corner": {"x": 1, "y": 2}, '
             '"color": "red"}]}'),
            (Named(1, Color.RED), '[1, "red"]'),
            ({"at": datetime(2026, 1, 2, tzinfo=UTC), "id": UUID(int=1)}, '{"at": "2026-01-02T00:00:00Z", "id": '
             '"00000000-0000-0000-0000-000000000001"}'),
            ({"path": Path("a/b"), "none": None}, '{"path": "a/b", "none": null}'),
            ([math.nan, 1.5], "[null, 1.5]"),
            (Holder({1: Box(corner=Point(1))}), '{"held": {"1": {"corner": {"x": 1, "y": 2}, "color": "red"}}}'),
        ],
    )  # fmt: skip
    async def test_typed_results_are_written_by_their_type(self, value: Any, text: str) -> None:
        """Dataclasses, pydantic models, typed dictionaries, named tuples, enumerations and times, in each other."""
        assert (await run(tool(name="t")(lambda: value))).content == text

    @pytest.mark.parametrize(
        ("value", "problem"),
        [
            (object(), "of type object, can't be written as JSON: JSON has nothing for object"),
            ([object()], "of type list, .*JSON has nothing for object"),
            (iter([1]), "nothing for list_iterator"),
            (len, "nothing for builtin_function"),
            ({(1, 2): 3}, "keys must be str"),
        ],
    )
    async def test_a_result_without_a_form_says_so(self, value: Any, problem: str) -> None:
        """The model learns that the tool was executed, and the author which type it was."""
        outcome = await run(tool(name="t")(lambda: value))
        assert outcome.outcome == "error"
        assert re.search(f"it was executed, but its result.*{problem}", outcome.content)

    def test_no_process_loads_pydantic_for_a_result(self) -> None:
        """A dataclass is written without it."""
        code = "import dataclasses, sys; from understudy.actors.results import rendered\n"
        code += (
            "kind = dataclasses.make_dataclass('P', ['x']); print(rendered(kind(1)).text, 'pydantic' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == '{"x": 1} False\n'

    async def test_result_that_json_cannot_show_is_an_error(self) -> None:
        """A circular result does not escape."""

        def circle() -> Any:
            items: list[Any] = []
            items.append(items)
            return items

        assert (await run(tool(circle))).outcome == "error"

    async def test_huge_result_is_cut_in_the_middle(self) -> None:
        """Beginning, end and true length stay."""
        outcome = await run(tool(name="t")(lambda: "a" * 5_000_000 + "z" * 5_000_000))
        assert len(outcome.content) <= MAX_RESULT_CHARACTERS
        assert outcome.content.startswith("aaa")
        assert outcome.content.endswith("zzz")
        assert "10000000" in outcome.content

    async def test_secrets_are_replaced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Values of secret variables never reach the model, nor escaped in JSON, nor in errors; short ones are kept."""
        monkeypatch.setenv("SOME_API_KEY", 'top"secret-1')
        monkeypatch.setenv("SOME_TOKEN", 'top"secret-1-and-more')
        monkeypatch.setenv("SHORT_TOKEN", "abc")

        def fail() -> None:
            raise ValueError('denied for top"secret-1')

        outcome = await run(tool(name="t")(lambda: 'abc top"secret-1 top"secret-1-and-more'))
        assert outcome.content == "abc *** ***"
        assert (await run(tool(name="t")(lambda: ['top"secret-1']))).content == '["***"]'
        assert (await run(tool(fail))).content == "ValueError: denied for ***"

    async def test_content_can_be_stored(self) -> None:
        """Half surrogate pairs and NUL, which databases refuse, are replaced."""
        assert (await run(tool(name="t")(lambda: "a\ud800b\0c"))).content == "a?b\ufffdc"


class TestFailures:
    @pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), GeneratorExit("x")])
    @pytest.mark.parametrize("is_async", [False, True])
    async def test_nothing_leaks(self, error: BaseException, is_async: bool) -> None:
        """Whatever a tool raises becomes an error with type and message; process and loop live on."""

        def fail() -> None:
            raise error

        async def fail_async() -> None:
            raise error

        if is_async and isinstance(error, GeneratorExit):
            error = RuntimeError("x")  # a coroutine's own protocol
        outcome = await run(tool(fail_async if is_async else fail))
        assert outcome.outcome == "error"
        assert outcome.content.startswith(type(error).__name__)
        assert "Traceback" not in outcome.content

    async def test_tool_error_shows_its_message_only(self) -> None:
        """Our own errors are shown without code and hint, which are for people."""

        def fail() -> None:
            raise ToolError("no such city")

        assert (await run(tool(fail))).content == "ToolError: no such city"

    async def test_message_that_raises_does_not_escape(self) -> None:
        """An exception whose text can't be had is still an outcome."""

        class Nasty(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        def fail() -> None:
            raise Nasty

        assert (await execute(direct(fail), "{}", CONTEXT, 30)).content.startswith("Nasty")

    async def test_async_tool_that_cancels_itself_is_an_error(self) -> None:
        """Only the caller's cancellation is raised."""

        async def quit_it() -> None:
            raise asyncio.CancelledError

        assert (await run(tool(quit_it))).outcome == "error"

    async def test_type_that_cannot_be_built_here_is_no_mistake_of_the_model(self) -> None:
        """A parameter's broken type is an error of the tool: other arguments would not help."""
        broken = loaded(paint)
        object.__setattr__(broken, "converted", {"color": "no.such.type"})
        outcome = await execute(broken, '{"color": "red", "points": []}', CONTEXT, 10)
        assert outcome.outcome == "error"


class TestTime:
    async def test_sync_tool_past_its_timeout_leaves_a_stuck_thread(self) -> None:
        """The caller goes on at once and learns that the process has to be replaced."""
        release = threading.Event()
        outcome = await execute(direct(release.wait), "{}", CONTEXT, 0.05)
        assert (outcome.outcome, outcome.stuck_thread) == ("timeout", True)
        stuck = [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX)]
        assert [thread.daemon for thread in stuck] == [True]
        release.set()
        stuck[0].join()

    async def test_stuck_threads_do_not_hold_up_others(self) -> None:
        """Each call has its own thread: fifty stuck ones leave the next call as fast as ever."""
        release = threading.Event()
        outcomes = await asyncio.gather(*(execute(direct(release.wait), "{}", CONTEXT, 0.05) for _ in range(50)))
        assert all(outcome.stuck_thread for outcome in outcomes)
        assert (await execute(direct(lambda: "quick"), "{}", CONTEXT, 30)).content == "quick"
        release.set()

    def test_stuck_thread_does_not_hold_up_exit(self) -> None:
        """A process ends although a tool of it never does."""
        code = """
import asyncio, threading
from understudy.actors.execution import bind, execute
from understudy.actors.tools import LoadedTool, ToolContext
context = ToolContext(session_id="s", run_id="r", round=1, call_id="c", epoch=1, agent="a")
schema = {"type": "object", "properties": {}}
tool = LoadedTool("t", threading.Event().wait, False, schema)
print(asyncio.run(execute(tool, bind(tool, "{}", context), 0.05)).outcome)
"""
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        assert result.stdout.strip() == "timeout"

    async def test_a_function_that_finds_out_is_watched_as_a_tool_is(self) -> None:
        """Given an `on_crash` function, not async, that outlives its timeout, then the caller was given what runs it,
        its thread is found among a tool's, and the outcome says that the process has to be replaced."""
        release, begun = threading.Event(), list[Any]()
        doubtful = dataclasses.replace(direct(None), reconcile=lambda _context: release.wait(20))
        outcome = await execution.reconcile(doubtful, CONTEXT, 0.05, math.inf, begun.append)
        stuck = [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX)]
        assert outcome is not None
        assert (outcome.outcome, outcome.stuck_thread, len(begun), len(stuck)) == ("interrupted", True, 1, 1)
        release.set()
        stuck[0].join()

    @pytest.mark.parametrize("kind", ["plain", "async", "object", "lambda"])
    async def test_any_kind_of_function_finds_out(self, kind: str) -> None:
        """What it returns is the call's result, and a coroutine is awaited whoever made it."""

        class Finder:
            async def __call__(self, context: ToolContext) -> str:
                return find_out(context)

        kinds: dict[str, Any] = {
            "plain": find_out, "async": Finder().__call__, "object": Finder(), "lambda": lambda found: Finder()(found)
        }  # fmt: skip
        tool = dataclasses.replace(direct(None), reconcile=kinds[kind])
        outcome = await execution.reconcile(tool, CONTEXT, 10, math.inf)
        assert outcome is not None
        assert (outcome.outcome, outcome.content, outcome.stuck_thread) == ("ok", "found s/r/1/0", False)

    async def test_what_finds_out_ends_with_the_call(self) -> None:
        """Given an `on_crash` function that returns a coroutine, when the call is given up, then that is cancelled."""
        waits, cancelled = asyncio.Event(), asyncio.Event()

        async def find_out_for_long() -> str:
            waits.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            return "found"

        tool = dataclasses.replace(direct(None), reconcile=lambda _context: find_out_for_long())
        finding = asyncio.create_task(execution.reconcile(tool, CONTEXT, 60, math.inf))
        await asyncio.wait_for(waits.wait(), 10)
        finding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finding
        await asyncio.wait_for(cancelled.wait(), 10)

    async def test_async_tool_past_its_timeout_is_cancelled(self) -> None:
        """It may clean up, and is not stuck."""
        cleaned = asyncio.Event()

        async def wait() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cleaned.set()

        outcome = await execute(direct(wait), "{}", CONTEXT, 0.01)
        assert (outcome.outcome, outcome.stuck_thread, cleaned.is_set()) == ("timeout", False, True)

    async def test_async_tool_that_ignores_cancellation_is_stuck(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """After the grace its process has to be replaced as if it were a thread."""
        monkeypatch.setattr(execution, "CANCEL_GRACE", 0.05)
        release = asyncio.Event()

        async def stubborn() -> None:
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    pass

        outcome = await execute(direct(stubborn), "{}", CONTEXT, 0.01)
        assert (outcome.outcome, outcome.stuck_thread) == ("timeout", True)
        release.set()

    async def test_cancelling_the_call_cancels_the_tool(self) -> None:
        """The caller's cancellation is raised, after the tool cleaned up."""
        started, cleaned = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                cleaned.set()

        call = asyncio.create_task(execute(direct(wait), "{}", CONTEXT, 30))
        await started.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert cleaned.is_set()

    async def test_thread_result_after_cancellation_is_dropped(self) -> None:
        """A thread that ends after its call was cancelled disturbs nobody."""
        started, release = threading.Event(), threading.Event()

        def wait() -> str:
            started.set()
            release.wait()
            return "late"

        call = asyncio.create_task(execute(direct(wait), "{}", CONTEXT, 30))
        await asyncio.to_thread(started.wait)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        thread = next(thread for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX))
        release.set()
        await asyncio.to_thread(thread.join)

    async def test_context_variables_reach_the_thread(self) -> None:
        """A sync tool sees the caller's context, in a copy."""
        variable = contextvars.ContextVar("variable", default="unset")
        variable.set("caller")

        def change() -> str:
            seen = variable.get()
            variable.set("tool")
            return seen

        assert (await execute(direct(change), "{}", CONTEXT, 30)).content == "caller"
        assert variable.get() == "caller"

    async def test_outcome_has_times_in_microseconds(self) -> None:
        """Duration and start are whole microseconds, and an outcome is plain data."""
        outcome = await execute(direct(lambda: "x"), "{}", CONTEXT, 30)
        assert outcome.duration > 0
        assert outcome.started_at > 1_500_000_000_000_000
        assert Outcome(**dataclasses.asdict(outcome)) == outcome


def direct(function: Any) -> LoadedTool:
    """A loaded tool without parameters, around any function, also one that can't be serialized."""
    is_async = asyncio.iscoroutinefunction(function)
    return LoadedTool("direct", function, is_async, {"type": "object", "properties": {}})


def test_call_key_is_the_same_in_every_activation() -> None:
    """It depends on session and call only, so it can be an idempotency key."""
    assert dataclasses.replace(CONTEXT, epoch=9).call_key == CONTEXT.call_key == "s/r/1/0"
