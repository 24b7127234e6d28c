"""The page: the fleet in a browser, served by the coordinator, read-only.

`server` answers, `state` is what it answers with, `assets` is the page itself, without a build step or a foreign
script. It shows the coordinator's view and nothing else; no request changes anything, and none may be added that does.
"""

from controlplane.web.server import serve_page

__all__ = ["serve_page"]
