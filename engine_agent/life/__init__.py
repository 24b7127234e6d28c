"""One incarnation of one engine: its gate, installs, live requests and devices. Carries out what the core decides.

`engine_life` puts a life together, and is what services know; the other files are its parts, which know `life_parts`
and never the life: what they find goes to it as events. A new thing that happens is an event of the core first. Nothing
here sets an applied version, opens a gate, or resumes an engine after a failure (INV-1, INV-4).
"""
