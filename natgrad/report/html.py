"""Numbers, text and tables as HTML. Text is escaped unless it is of the type `Html`."""

import html
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

DASH = "–"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Html(str):
    """Text that is HTML already and is not escaped again."""


def escape(text: Any) -> Html:
    """Text as HTML, with an en dash for `None`."""
    if isinstance(text, Html):
        return text
    return Html(DASH if text is None else html.escape(str(text)))


def join(parts: Iterable[Any], between: str = "") -> Html:
    """The parts that are not empty, escaped and joined."""
    return Html(between.join(escape(part) for part in parts if part != ""))


def capitalised(text: str) -> str:
    """The text with a capital first letter. `str.capitalize` would lower the others."""
    return text[:1].upper() + text[1:]


def element(tag: str, content: Any, **attributes: str) -> Html:
    """`<tag …>content</tag>`, or nothing if there is no content. `class_` is written `class`."""
    if content == "":
        return Html()
    written = "".join(f' {name.strip("_").replace("_", "-")}="{escape(v)}"' for name, v in attributes.items())
    return Html(f"<{tag}{written}>{escape(content)}</{tag}>")


def number(value: float | None) -> str:
    """Three significant digits, with a power of ten where the number is very small or very large."""
    if value is None:
        return DASH
    digits, exponent = f"{value:.2e}".split("e")
    if value == 0 or -4 < int(exponent) < 6:
        # Decimal prints 0.000123 and 123000 without an exponent.
        text = f"{Decimal(f'{value:.2e}'):,f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        text = f"{digits.rstrip('0').rstrip('.')}×10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    return text.replace("-", "−")


def count(value: int | None) -> str:
    """A whole number, with separators between thousands."""
    return DASH if value is None else f"{value:,}"


def seconds(value: float | None) -> str:
    """A time in seconds, milliseconds or microseconds."""
    if value is None:
        return DASH
    for least, factor, unit in ((0.5, 1, "s"), (5e-4, 1e3, "ms")):
        if abs(value) >= least or value == 0:
            return f"{number(value * factor)}\u00a0{unit}"
    return f"{number(value * 1e6)}\u00a0µs"


def settings(values: dict[str, Any]) -> Html:
    """Settings of a method, one below the other."""
    lines = []
    for name, value in values.items():
        code = element("code", number(value) if isinstance(value, float) else value)
        lines.append(element("span", join([f"{name.replace('_', ' ')} ", code])))
    return join(lines, "<br>")


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[Any]], numeric: Iterable[int] = ()) -> Html:
    """A table that scrolls inside its own box.

    The first column names the row, the columns `numeric` are aligned right, and empty columns are left out."""
    rows = list(rows)
    if not rows:
        return Html()
    columns = [k for k in range(1, len(header)) if any(row[k] != "" for row in rows)]
    align = {k: ' class="number"' if k in set(numeric) else "" for k in (0, *columns)}
    names = [f'<th scope="col"{align[k]}>{escape(header[k])}</th>' for k in (0, *columns)]
    lines = [
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td{align[k]}>{escape(row[k])}</td>" for k in columns)
        + "</tr>"
        for row in rows
    ]
    return Html(
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f'<caption class="hidden">{escape(caption)}</caption>'
        f"<thead><tr>{''.join(names)}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def folded(summary: str, content: Html) -> Html:
    """Content that opens with a click on its summary."""
    return element("details", join([element("summary", summary), content])) if content else Html()


def section(anchor: str, title: str, *content: Any) -> Html:
    """A section of the page, or nothing if it has no content."""
    body = join(content)
    return element("section", join([element("h2", title), body]), id=anchor) if body else Html()
