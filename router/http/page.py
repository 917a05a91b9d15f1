"""The page `/ui`: one answer that asks nobody else for anything, put together when the router starts.

Knows the files in `ui/` and what a browser may do with them; must not know the router. The page itself needs no API
key; what it shows it gets from `/baton/overview` and `/v1/...`, like any client.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from baton.config import ClusterConfig

SCRIPTS = ("dom.js", "api.js", "charts.js", "waterfall.js", "overview.js", "playground.js", "main.js")
"""Joined in this order into one script."""


class Page:
    """The page's bytes, and the headers that let it run its own script and style and nothing else."""

    def __init__(self) -> None:
        folder = files("router.http") / "ui"
        script = "".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
        script = f'"use strict";\n(() => {{\n{script}}})();\n'
        style = (folder / "style.css").read_text(encoding="utf-8")
        template = (folder / "page.html").read_text(encoding="utf-8")
        self.body = template.replace("{{style}}", style).replace("{{script}}", script).encode()
        self.headers = {
            "Content-Security-Policy": "; ".join(
                (
                    "default-src 'none'",
                    f"script-src '{_digest(script)}'",
                    f"style-src '{_digest(style)}'",
                    "connect-src 'self'",
                    "img-src data:",  # the icon
                    "base-uri 'none'",
                    "form-action 'none'",
                    "frame-ancestors 'none'",
                    "require-trusted-types-for 'script'",  # no text becomes markup
                    "trusted-types 'none'",
                )
            ),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
            "ETag": f'"{hashlib.sha256(self.body).hexdigest()[:32]}"',
        }


def routes(config: ClusterConfig) -> list[Route]:
    """`/ui`, and the way there; none if `http.ui` is off."""
    if not config.http.ui:
        return []
    page = Page()

    async def ui(request: Request) -> Response:
        if page.headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=page.headers)
        return Response(page.body, media_type="text/html", headers=page.headers)

    async def root(request: Request) -> Response:
        return RedirectResponse("ui")  # relative: the router may be behind a path of another server

    return [Route("/ui", ui), Route("/", root)]


def _digest(text: str) -> str:
    """As a Content-Security-Policy names an inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
