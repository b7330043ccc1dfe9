"""Bars of the profile's page as SVG, drawn without scripts: stacked parts on one scale, and a line of the capacity."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zerocli.profile.colours import OTHER

WIDTH, LABEL, BAR, GAP = 1000, 190, 20, 8
"""Of the drawing: its width, the room for labels at its left, the height of a bar, the space between bars."""
AFTER = 130
"""Room for the total after a bar."""
SHOWN_CAPACITY = 3.0
"""A capacity up to this many times the longest bar is drawn on the bars' scale; a larger one is only written."""


@dataclass(frozen=True)
class Bar:
    """One bar: its label, its parts by name in order, and the text after it."""

    label: str
    parts: Mapping[str, float]
    after: str = ""

    @property
    def total(self) -> float:
        return sum(max(0.0, value) for value in self.parts.values())


def bars(
    rows: Sequence[Bar],
    colours: Mapping[str, str],
    show: Callable[[float], str],
    capacity: float | None = None,
    title: str = "",
) -> str:
    """Return the bars on one scale; `show` writes a value."""
    longest = max([row.total for row in rows], default=0.0)
    drawn = capacity if capacity and longest and capacity <= SHOWN_CAPACITY * longest else None
    most = max(longest, drawn or 0.0) or 1.0
    room = WIDTH - LABEL - AFTER
    scale = room / most
    height = len(rows) * (BAR + GAP) + (26 if capacity else GAP)
    made = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" class="bars"><title>{html.escape(title)}</title>']
    for index, row in enumerate(rows):
        made += _bar(row, index * (BAR + GAP) + GAP // 2, scale, colours, show)
    if capacity:
        made += _line(capacity, LABEL + (drawn * scale if drawn else room), height, drawn is not None, show)
    return "".join([*made, "</svg>"])


def _bar(row: Bar, y: int, scale: float, colours: Mapping[str, str], show: Callable[[float], str]) -> list[str]:
    middle = y + BAR / 2 + 4
    label = row.label if len(row.label) <= 26 else f"{row.label[:12]}…{row.label[-12:]}"
    made = [f'<text x="{LABEL - 8}" y="{middle}" text-anchor="end">{html.escape(label)}</text>']
    x = float(LABEL)
    for name, value in row.parts.items():
        wide = max(0.0, value) * scale
        if wide:
            words = html.escape(f"{name.replace('_', ' ')}: {show(value)}")
            fill = colours.get(name, OTHER)
            place = f'x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{BAR}"'
            made.append(f'<rect {place} fill="{fill}"><title>{words}</title></rect>')
            x += wide
    made.append(f'<text x="{x + 6:.2f}" y="{middle}">{html.escape(row.after or show(row.total))}</text>')
    return made


def _line(capacity: float, x: float, height: int, to_scale: bool, show: Callable[[float], str]) -> list[str]:
    words = f"capacity {show(capacity)}" + ("" if to_scale else ", beyond this scale →")
    line = f'<line class="capacity" x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{height - 16}"/>' if to_scale else ""
    place = f'x="{min(x, WIDTH - 4):.2f}" y="{height - 4}" text-anchor="end"'
    return [line, f'<text class="capacity" {place}>{html.escape(words)}</text>']


def legend(names: Sequence[str], colours: Mapping[str, str]) -> str:
    """Return the names with their colours."""
    chips = (
        f'<span><i class="chip" style="background:{colours.get(name, OTHER)}"></i>'
        f"{html.escape(name.replace('_', ' '))}</span>"
        for name in names
    )
    return f'<div class="legend soft">{"".join(chips)}</div>'
