"""The page at /: routes for index.html, page.js and page.css, which `make page` builds from the sources in page/.

A browser that shows it loads and asks nothing from elsewhere, and no text of a model can become a part of the page: the
headers forbid it.
"""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FILES = {"/": ("index.html", "text/html"), "/page.js": ("page.js", "text/javascript"), "/page.css": ("page.css", "text/css")}
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a browser keeps the files, and asks each time whether they are the newest
}


def routes() -> list[Route]:
    """Return a route for each file of the page."""
    return [_route(path, *file) for path, file in FILES.items()]


def _route(path: str, name: str, kind: str) -> Route:
    content = (files(__name__) / name).read_bytes()
    headers = {**HEADERS, "ETag": f'"{sha256(content).hexdigest()[:32]}"'}

    async def answer(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if headers["ETag"] in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=kind)

    return Route(path, answer, methods=["GET"])
