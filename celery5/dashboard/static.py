"""Serve the style sheet and the scripts: under a path that changes with their content, to be kept."""

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "static"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class StaticFiles:
    """The files of the folder `static`."""

    def __init__(self) -> None:
        self._files = {
            path.name: path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES
        }
        digest = hashlib.sha256(b"".join(self._files.values())).hexdigest()
        # Modules import each other by relative names, so all have the version of all in their path.
        self.path: str = f"/static/{digest[:12]}/"

    @property
    def paths(self) -> frozenset[str]:
        """The paths of the files: nothing else below `/static` is shown to everybody."""
        return frozenset(self.path + name for name in self._files)

    def make_routes(self) -> list[Route]:
        """Return the route of the files."""
        return [Route(self.path + "{name}", self._answer)]

    async def _answer(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._files:
            return Response(status_code=404)
        headers = {"cache-control": "public, max-age=31536000, immutable"}
        return Response(self._files[name], media_type=TYPES[Path(name).suffix], headers=headers)
