"""The `view_image` tool: an image or a PDF of the workspace as something that the model sees."""

from __future__ import annotations

from understudy.attachments import MAX_BYTES, MAX_NAME, File, Image
from understudy.errors import InvalidInput, ToolError

from .tools import ToolContext, tool
from .workspace import Workspace


@tool(on_crash="rerun")
def view_image(path: str, context: ToolContext) -> Image | File:
    """Look at an image (PNG, JPEG, GIF or WebP) or a PDF of the workspace. You are shown it behind the result.

    Args:
        path: Path of the file, relative to the workspace.
    """
    workspace = Workspace(context.workspace)
    location = workspace.resolve(path)
    with workspace.open_file(location) as stream:
        data = stream.read(MAX_BYTES + 1)
    name = workspace.shown(location)[-MAX_NAME:]
    try:
        return File(data, name) if data.startswith(b"%PDF-") else Image(data, name)
    except InvalidInput as error:
        raise ToolError(f"{name}: {error.message}") from None
