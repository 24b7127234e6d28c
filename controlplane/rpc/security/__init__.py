"""Who is on the other side of a port, and that nobody listens in between.

TLS and certificates are gRPC's own; tokens are for callers without certificates. Who may call what is decided in
`controlplane.core.access`, from the identity that was proved here.
"""

from controlplane.rpc.security.guard import Guard, ServerSecurity, caller
from controlplane.rpc.security.http import HttpGuard, http_tls
from controlplane.rpc.security.settings import PLAIN, TlsSettings, check_listen

__all__ = ["PLAIN", "Guard", "HttpGuard", "ServerSecurity", "TlsSettings", "caller", "check_listen", "http_tls"]
