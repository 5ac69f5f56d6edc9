"""`McpServer`: a server of the Model Context Protocol whose tools an agent has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from .strict import Strict, Variable

SERVER_NAME = r"^[A-Za-z0-9_-]{1,32}$"

Pattern = Annotated[str, Field(min_length=1, max_length=128)]


class McpServer(Strict):
    """A server of the Model Context Protocol (docs/mcp.md). Its tools are the agent's, named `SERVER_TOOL`.

    It runs on the node of the session, in a process of its own; `McpServer("time", command=["mcp-server-time"])`.

    Attributes:
        name: begins the names of its tools.
        command: starts a server that is spoken to by its standard input and output.
        url: of a server that is spoken to by HTTP (streamable HTTP). There is either a command or a url.
        share: who uses one process: a session (`session`), all sessions of a tree (`tree`), or all sessions of a node
            that have the same configuration and workspace (`node`).
        include, exclude: which of its tools the agent has: patterns as of file names, of the server's own names.
        environment: names of variables that the server is given with the values of the node's own environment. Nobody
            else is given them.
        headers: of HTTP requests; each value is the name of a variable of the node's environment that holds the value.
        on_crash: what is done about a call in doubt, by patterns of the server's own names of tools, instead of what
            the server says of them: `rerun`, `report` or `ask`.
        timeout: seconds for one call.
        required: a run fails where the server can't be used; otherwise it goes on without the server's tools.
    """

    name: str = Field(pattern=SERVER_NAME)
    command: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    url: str | None = Field(None, pattern=r"^https?://\S+$")
    share: Literal["session", "tree", "node"] = "session"
    include: tuple[Pattern, ...] = ("*",)
    exclude: tuple[Pattern, ...] = ()
    environment: tuple[Variable, ...] = ()
    headers: dict[str, Variable] = Field(default_factory=dict)
    on_crash: dict[Pattern, Literal["rerun", "report", "ask"]] = Field(default_factory=dict)
    timeout: float = Field(60.0, gt=0, le=86_400)
    required: bool = False

    POSITIONAL: ClassVar[tuple[str, ...]] = ("name",)

    if TYPE_CHECKING:  # no method of the class: pydantic would not tell where in an agent's list a problem is

        def __init__(self, name: str, /, **data: Any) -> None: ...

    @field_validator("command", mode="before")
    @classmethod
    def _command(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError("must be a list: the program and its arguments")
        return value

    @field_validator("environment")
    @classmethod
    def _environment(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(set(value)))

    @model_validator(mode="after")
    def _one_way(self) -> McpServer:
        if bool(self.command) == (self.url is not None):
            raise ValueError("needs either a command or a url")
        if self.headers and self.url is None:
            raise ValueError("headers are for a url")
        if self.environment and self.url is not None:
            raise ValueError("environment is for a command")
        return self


def twice(servers: tuple[McpServer, ...]) -> list[str]:
    """Names that several of these servers have."""
    names = [server.name for server in servers]
    return sorted({name for name in names if names.count(name) > 1})
