"""One incarnation of one engine: its gate, installs, live requests and devices. Carries out what the core decides."""
