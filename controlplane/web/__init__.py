"""The page: the fleet in a browser, served by the coordinator, read-only."""

from controlplane.web.server import PageRefused, serve_page

__all__ = ["PageRefused", "serve_page"]
