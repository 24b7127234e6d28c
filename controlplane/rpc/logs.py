"""Structured logs: one event a line, JSON when nobody watches, colours on a terminal.

Event names are constants in snake_case; ids and numbers are fields, never formatted into the name.
Logs go to stderr: stdout belongs to the command.
"""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logging(component: str, *, json: bool | None = None, level: str = "INFO") -> None:
    """Set up structlog for this process. `component` (coordinator, engine, trainer, …) is on every line."""
    as_json = not sys.stderr.isatty() if json is None else json
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    )
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if as_json:
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(component=component)
