"""The page: the fleet in a browser, served by the coordinator, read-only."""

from controlplane.web.server import serve_page

__all__ = ["serve_page"]
