"""What a server offers as tools, and what it answers as text. Pure, but for the questions to the server."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from mcp import Client
from mcp.shared.exceptions import MCPError
from mcp_types import METHOD_NOT_FOUND, CallToolResult, EmbeddedResource, Prompt, Resource, TextContent
from mcp_types import Tool as McpTool

from understudy.messages import storable
from understudy.tool_hosting import GET_PROMPT, LIST_RESOURCES, READ_RESOURCE, ServerTool

from .limits import (
    LONGEST_CONTENT,
    LONGEST_DESCRIPTION,
    LONGEST_LIST,
    LONGEST_NAME,
    LONGEST_SCHEMA,
    MOST_PAGES,
    MOST_TOOLS,
)

NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


async def tools_of(client: Client) -> tuple[list[ServerTool], list[str]]:
    """The tools of a server, with those by which its resources and prompts are had; and what was left out, and why."""
    found: list[ServerTool] = []
    left_out: list[str] = []
    capabilities = client.server_capabilities
    offered: list[ServerTool] = []
    if capabilities.tools is not None:
        listed = await _pages(
            lambda cursor: client.list_tools(cursor=cursor, cache_mode="bypass"), lambda page: page.tools
        )
        for tool in listed:
            described, problem = _described(tool)
            if described is not None:
                offered.append(described)
            else:
                left_out.append(f"{storable(tool.name)[:100]}: {problem}")
    names = {tool.name for tool in offered}
    if capabilities.resources is not None and any(await _if_it_can(_resources(client))):
        offered += [tool for tool in _RESOURCE_TOOLS if tool.name not in names]
    if capabilities.prompts is not None and GET_PROMPT not in names:
        prompts = await _if_it_can(
            _pages(lambda cursor: client.list_prompts(cursor=cursor, cache_mode="bypass"), lambda page: page.prompts)
        )
        offered += [_prompt_tool(prompts)] if prompts else []
    size = 0
    for tool in offered:
        size += len(tool.description) + len(json.dumps(tool.parameters))
        if len(found) >= MOST_TOOLS or size > LONGEST_LIST:
            left_out.append(f"{tool.name}: the list is too long")
        else:
            found.append(tool)
    return found, left_out[:MOST_TOOLS]


async def _if_it_can(listed: Awaitable[Iterable[Any]]) -> Iterable[Any]:
    """A list that a server says to have, and may fail to give: its tools are of use without."""
    try:
        return await listed
    except MCPError:
        return ()


async def _pages(page: Callable[[str | None], Awaitable[Any]], items: Callable[[Any], list[Any]]) -> list[Any]:
    """All items of a list that comes in pages; none of a list that the server does not have after all."""
    found: list[Any] = []
    cursor: str | None = None
    for _ in range(MOST_PAGES):
        try:
            result = await page(cursor)
        except MCPError as error:
            if error.code == METHOD_NOT_FOUND:
                break
            raise
        found += items(result)
        cursor = result.next_cursor
        if not cursor or len(found) > MOST_TOOLS:
            break
    return found


def _described(tool: McpTool) -> tuple[ServerTool | None, str]:
    """A tool, or why it can't be used."""
    if len(tool.name) > LONGEST_NAME:
        return None, "its name is too long"
    schema = tool.input_schema if isinstance(tool.input_schema, dict) else {}
    if len(json.dumps(schema)) > LONGEST_SCHEMA:
        return None, "its schema is too long"
    if schema.get("type", "object") != "object" or not isinstance(schema.get("properties", {}), dict):
        return None, "its arguments are no object"
    parameters = {**schema, "type": "object", "properties": schema.get("properties", {})}
    hints = tool.annotations
    again = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
    description = storable(tool.description or tool.title or "")[:LONGEST_DESCRIPTION]
    return ServerTool(tool.name, description, parameters, "rerun" if again else "report"), ""


_RESOURCE_TOOLS = (
    ServerTool(
        LIST_RESOURCES, "List the resources (documents, data) that this server offers to read.", NOTHING, "rerun",
        LIST_RESOURCES,
    ),
    ServerTool(
        READ_RESOURCE, "Read a resource of this server.",
        {
            "type": "object", "properties": {"uri": {"type": "string", "description": "As the list has it."}},
            "required": ["uri"], "additionalProperties": False,
        },
        "rerun", READ_RESOURCE,
    ),
)  # fmt: skip


def _prompt_tool(prompts: Iterable[Prompt]) -> ServerTool:
    """The tool that brings a prompt; its description says which there are."""
    lines = []
    for prompt in prompts:
        given = ", ".join(f"{one.name}{'' if one.required else '?'}" for one in prompt.arguments or ())
        lines.append(f"- {prompt.name}({given}): {prompt.description or prompt.title or ''}")
    text = "Get the text of one of the prompts that this server has prepared:\n" + "\n".join(lines)
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "arguments": {"type": "object", "additionalProperties": {"type": "string"}},
        },
        "required": ["name"],
        "additionalProperties": False,
    }
    return ServerTool(GET_PROMPT, storable(text)[:LONGEST_DESCRIPTION], schema, "rerun", GET_PROMPT)


def text_of(result: CallToolResult) -> str:
    """The result of a tool as text."""
    parts = [_part(part) for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return bounded("\n".join(parts))


async def resources_of(client: Client) -> str:
    """The resources of a server, one a line, and its templates."""
    resources, templates = await _resources(client)
    lines = [f"{one.uri} {one.mime_type or ''} {one.description or one.name}" for one in resources]
    lines += [f"{one.uri_template} (a template) {one.description or one.name}" for one in templates]
    return bounded("\n".join(lines) or "There are none.")


async def _resources(client: Client) -> tuple[list[Resource], list[Any]]:
    """The resources of a server, and the templates of some."""
    resources = await _pages(
        lambda cursor: client.list_resources(cursor=cursor, cache_mode="bypass"), lambda page: page.resources
    )
    templates = await _pages(
        lambda cursor: client.list_resource_templates(cursor=cursor, cache_mode="bypass"),
        lambda page: page.resource_templates,
    )
    return resources, templates


async def resource_of(client: Client, uri: str) -> str:
    """A resource as text."""
    result = await client.read_resource(uri, cache_mode="bypass")
    return bounded("\n".join(_contents(one) for one in result.contents))


async def prompt_of(client: Client, name: str, arguments: dict[str, str]) -> str:
    """The messages of a prompt as text."""
    result = await client.get_prompt(name, arguments)
    return bounded("\n\n".join(f"{message.role}: {_part(message.content)}" for message in result.messages))


def _part(part: Any) -> str:
    if isinstance(part, TextContent):
        return part.text
    if isinstance(part, EmbeddedResource):
        return _contents(part.resource)
    if part.type == "resource_link":
        return f"[resource {part.uri}: {part.description or part.name}]"
    return f"[{part.type}, {part.mime_type}, {len(part.data) * 3 // 4} bytes: not shown]"


def _contents(contents: Any) -> str:
    text: str | None = getattr(contents, "text", None)
    if text is not None:
        return text
    return f"[{contents.uri}, {contents.mime_type or 'binary'}, {len(contents.blob) * 3 // 4} bytes: not shown]"


def bounded(text: str) -> str:
    """A text that every store can keep, without its middle if it is too long."""
    text = storable(text)
    if len(text) <= LONGEST_CONTENT:
        return text
    half = LONGEST_CONTENT // 2 - 100
    return f"{text[:half]}\n[… {len(text)} characters in all; the middle is left out …]\n{text[-half:]}"
