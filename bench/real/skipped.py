"""Rows that a quick run leaves out: the starts of their engines alone would take it longer than its three minutes."""

from __future__ import annotations

from bench.harness import Row


def not_quick(name: str, engines: int) -> list[Row]:
    return [
        Row(
            name=name,
            what="",
            ours=None,
            other=None,
            unit="",
            ratio=None,
            goal="",
            met=None,
            note=f"not in a quick run: it starts {engines} real engine{'s' if engines > 1 else ''}",
        )
    ]
