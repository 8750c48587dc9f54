"""The script of a page: memory over modelled time, legends below figures where a page is narrow, points side by side.

    [events] [modelled time]        moves every point of the figure of memory to its event's time, and back
    narrow page                     legends below the figures, else at their right
    [batch 1 v] [batch 2 v]         two points of a plan, chosen among all, figure by figure with the change

The page's content policy allows inline scripts and no request. Texts are set as text, never as HTML.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

AXIS = """<p class="pick" role="radiogroup" aria-label="horizontal axis">Across:
<label><input type="radio" name="axis" value="events" checked> events, in order</label>
<label><input type="radio" name="axis" value="time"> modelled time</label></p>"""

FIGURES = """<script>
(() => {
  const narrow = matchMedia("(max-width: 60rem)");
  const lay = () => document.querySelectorAll(".plotly-graph-div").forEach(figure => {
    const both = figure.layout.meta && figure.layout.meta.legends;
    if (!both) return;
    const chosen = both[narrow.matches ? "narrow" : "wide"];
    for (const box of [figure, figure.parentElement]) box.style.height = chosen.height + "px";
    Plotly.relayout(figure, chosen);
  });
  narrow.addEventListener("change", lay);
  lay();

  const memory = document.getElementById("memory"), meta = memory && memory.layout.meta;
  if (!meta || !meta.clocks) return;
  const numbers = (data, type) => new type(Uint8Array.from(atob(data), c => c.charCodeAt(0)).buffer);
  const values = x => x && x.bdata ? numbers(x.bdata, x.dtype === "i4" ? Int32Array : Float64Array) : x;
  const clocks = meta.clocks.map(both => both.map(data => numbers(data, Float64Array)));
  const at = ([events, times], x) => {
    let low = 0, high = events.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (events[middle] <= x) low = middle; else high = middle;
    }
    const share = (x - events[low]) / (events[high] - events[low] || 1);
    return times[low] + share * (times[high] - times[low]);
  };
  const kept = memory.data.map(t => ({x: Array.from(values(t.x)), base: t.base && Array.from(values(t.base))}));
  const timed = kept.map(({x, base}, i) => {
    const clock = clocks[meta.of[i]];
    if (!base) return {x: x.map(each => at(clock, each))};
    const start = base.map(each => at(clock, each));
    return {base: start, x: x.map((each, j) => at(clock, base[j] + each) - start[j])};
  });
  const menu = memory.layout.updatemenus[0].buttons.map(button => button.args[1]);
  const text = {events: [memory.layout.xaxis.title.text, memory.layout.xaxis.unifiedhovertitle.text],
                time: ["modelled time, " + meta.unit, "at %{x:.4~g} " + meta.unit]};
  document.querySelectorAll("input[name=axis]").forEach(input => input.addEventListener("change", () => {
    const isTime = input.value === "time", found = isTime ? timed : kept;
    const range = (i, both) => isTime ? both.map(each => at(clocks[i >> 1], each)) : both;
    const shown = memory.data.findIndex(t => t.visible === true), change = {"xaxis.tickformat": isTime ? "" : ",d"};
    const across = i => range(i, menu[i]["xaxis.range"]);
    menu.forEach((whole, i) => {
      change["updatemenus[0].buttons[" + i + "].args[1]"] = {...whole, "xaxis.range": across(i)};
    });
    change["xaxis.range"] = across(2 * meta.of[shown]);
    [change["xaxis.title.text"], change["xaxis.unifiedhovertitle.text"]] = text[input.value];
    const bases = found.flatMap((each, i) => each.base ? [i] : []);
    Plotly.update(memory, {x: found.map(each => each.x)}, change).then(() =>
      bases.length && Plotly.restyle(memory, {base: bases.map(i => found[i].base)}, bases));
  }));
})();
</script>"""

_BESIDE = """<script>
(() => {
  const choices = JSON.parse(document.getElementById("choices").textContent);
  const picks = ["first", "second"].map(id => document.getElementById(id));
  const table = document.getElementById("beside");
  const row = (cells, kind) => {
    const made = document.createElement("tr");
    cells.forEach((text, i) => {
      const cell = made.appendChild(document.createElement(kind));
      cell.textContent = text;
      if (i) cell.className = "number";
    });
    return made;
  };
  const change = (a, b) => {
    if (typeof a !== "number" || typeof b !== "number" || !a) return "";
    const share = 100 * (b / a - 1);
    return Math.abs(share) < 0.05 ? "same" : (share > 0 ? "+" : "\u2212") + Math.abs(share).toFixed(1) + "%";
  };
  const show = () => {
    const [a, b] = picks.map(pick => choices[pick.value]);
    const names = [...new Set([...Object.keys(a.figures), ...Object.keys(b.figures)])];
    table.replaceChildren(row(["", a.name, b.name, "change"], "th"), ...names.map(name => {
      const [x, y] = [a, b].map(each => each.figures[name] || [null, ""]);
      return row([name, x[1], y[1], change(x[0], y[0])], "td");
    }));
  };
  picks.forEach(pick => pick.addEventListener("change", show));
  show();
})();
</script>"""


class ComparedPlan(NamedTuple):
    """A point that can be put beside another one. figures: name -> (the number; as text)."""

    name: str
    figures: Mapping[str, tuple[float, str]]


def side_by_side_html(choices: Sequence[ComparedPlan], first: int = 0, second: int = 1) -> str:
    """Two menus and a table of the two chosen points. first, second: what is chosen at first."""

    def menu(name: str, label: str, chosen: int) -> str:
        options = (
            f'<option value="{i}"{" selected" if i == chosen else ""}>{html.escape(each.name)}</option>'
            for i, each in enumerate(choices)
        )
        return f'<select id="{name}" aria-label="{label}">{"".join(options)}</select>'

    content = json.dumps([each._asdict() for each in choices]).replace("<", "\\u003c")
    return (
        f'<p class="pick">{menu("first", "the first point", first)} and '
        f"{menu('second', 'the second point', second)}</p>"
        '<div class="scroll"><table id="beside"></table></div>'
        f'<script type="application/json" id="choices">{content}</script>{_BESIDE}'
    )
