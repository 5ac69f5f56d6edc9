"""The text of an HTML page, with its headings, lists and links as Markdown has them."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from urllib.parse import urljoin

SKIPPED = frozenset({"script", "style", "template", "svg", "iframe", "object", "select"})
BLOCKS = frozenset(
    {"address", "article", "aside", "blockquote", "body", "details", "div", "dl", "fieldset", "figcaption", "figure"}
    | {"footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "html", "main", "nav", "ol", "p", "pre"}
    | {"section", "summary", "table", "tbody", "tfoot", "thead", "ul"}
)
LINES = frozenset({"dd", "dt", "li", "tr"})


def html_text(page: str, url: str) -> tuple[str, str]:
    """A page's title and text.

    Args:
        url: that relative links begin from.
    """
    reader = _Reader(url)
    reader.feed(page)
    reader.close()
    text = re.sub(r"[ \t]+\n", "\n", "".join(reader.pieces))
    return " ".join("".join(reader.title).split()), re.sub(r"\n{3,}", "\n\n", text).strip()


class _Reader(HTMLParser):
    def __init__(self, url: str) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.title: list[str] = []
        self._url = url
        self._skipped = 0
        self._verbatim = 0
        self._in_title = False
        self._link: tuple[str, int] | None = None  # where a link leads, and the number of pieces before it

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in SKIPPED:
            self._skipped += 1
        elif tag == "title":
            self._in_title = True
        elif tag == "br":
            self.pieces.append("\n")
        elif tag in BLOCKS or tag in LINES:
            self._break(tag)
            self._verbatim += tag == "pre"
            if re.fullmatch("h[1-6]", tag):
                self.pieces.append("#" * int(tag[1]) + " ")
            self.pieces.append("- " if tag == "li" else "")
        elif tag in ("td", "th"):
            self.pieces.append(" | ")
        elif tag == "img" and values.get("alt"):
            self.handle_data(f"[image: {values['alt']}]")
        elif tag == "a" and values.get("href"):
            self._link = (values["href"] or "", len(self.pieces))

    def handle_endtag(self, tag: str) -> None:
        if tag in SKIPPED:
            self._skipped = max(0, self._skipped - 1)
        elif tag == "title":
            self._in_title = False
        elif tag in BLOCKS or tag in LINES:
            self._verbatim = max(0, self._verbatim - (tag == "pre"))
            self._break(tag)
        elif tag == "a" and self._link is not None:
            (href, start), self._link = self._link, None
            text = "".join(self.pieces[start:]).strip()
            target = self._target(href)
            if text and target and "\n" not in text:
                self.pieces[start:] = [f"[{text}]({target})"]

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title.append(data)
        elif self._skipped:
            return
        elif self._verbatim:
            self.pieces.append(data)
        else:
            text = re.sub(r"\s+", " ", data)
            at_start = not self.pieces or self.pieces[-1].endswith(("\n", " "))
            self.pieces.append(text.lstrip() if at_start else text)

    def _break(self, tag: str) -> None:
        while self.pieces and not self.pieces[-1]:
            self.pieces.pop()
        wanted = "\n" if tag in LINES else "\n\n"
        if self.pieces and not self.pieces[-1].endswith(wanted):
            self.pieces.append("\n" if self.pieces[-1].endswith("\n") else wanted)

    def _target(self, href: str) -> str:
        """Where a link leads; empty for one within the page, or to something else than a page."""
        try:
            target = urljoin(self._url, href.strip())
        except ValueError:
            return ""
        return target if target.startswith(("http://", "https://")) and not href.startswith("#") else ""
