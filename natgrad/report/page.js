"use strict";

(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const choice = { x: "step", y: "training", scale: "log" };
  const hidden = new Set();
  const PAPER_WIDTH = 660;
  let onScreen = null; // the theme to restore after printing
  const root = document.documentElement;
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");

  // A CSS property holds `light-dark(…)` unresolved; the computed colour of an element is resolved.
  const probe = document.body.appendChild(document.createElement("span"));
  probe.hidden = true;
  const colour = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };

  // Plotly interprets a few HTML tags in its text.
  const escape = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

  const number = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en-GB");
    if (size >= 1e-3 && size < 1e6) return value.toLocaleString("en-GB", { maximumSignificantDigits: 3 });
    const [digits, exponent] = value.toExponential(2).split("e");
    return `${Number(digits)}×10<sup>${Number(exponent)}</sup>`.replaceAll("-", "−");
  };

  const chosen = (chart, axis) => (choice[axis] in chart[axis] ? choice[axis] : Object.keys(chart[axis])[0]);
  const scaleOf = (chart) => (chart.y_scales.includes(choice.scale) ? choice.scale : chart.y_scales[0]);

  const hoverText = (chart, line, index) => {
    const height = chosen(chart, "y");
    const names = Object.entries(chart.x).map(([axis, name]) => `${name} ${number(line.x[axis][index])}`);
    const note = line.notes && line.notes[index] !== "complete" ? ` (${escape(line.notes[index])})` : "";
    const value = `${escape(chart.y[height])} <b>${number(line.y[height][index])}</b>${note}`;
    return [`<b>${escape(line.name)}</b>`, ...names, value].join("<br>");
  };

  const lineTrace = (chart, line) => {
    const x = line.x[chosen(chart, "x")];
    const ink = colour(`line-${line.colour}`);
    const isHollow = (line.notes ?? []).map((note) => note !== "complete");
    const symbol = isHollow.length ? isHollow.map((open) => line.symbol + (open ? "-open" : "")) : line.symbol;
    return {
      type: "scatter",
      mode: "lines+markers",
      name: escape(line.name),
      x,
      y: line.y[chosen(chart, "y")],
      line: { color: ink, width: 2.25, dash: line.dash },
      marker: { color: ink, size: 8, symbol, maxdisplayed: line.notes ? 0 : 9 },
      visible: !hidden.has(line.key),
      hoverinfo: "text",
      hovertext: x.map((_, index) => hoverText(chart, line, index)),
    };
  };

  const barTrace = (chart, line) => {
    const { angle } = line.x;
    return {
      type: "bar",
      orientation: "h",
      name: escape(line.name),
      x: angle,
      y: line.y.structure.map(escape),
      marker: { color: colour(`line-${line.colour}`) },
      visible: !hidden.has(line.key),
      text: angle.map((value) => `${number(value)}°`),
      textposition: "auto",
      hoverinfo: "text",
      hovertext: angle.map(
        (value, index) => `<b>${escape(line.y.structure[index])}</b><br>${escape(line.name)}<br>${number(value)}°`,
      ),
    };
  };

  // The range of the runs that did not diverge: the others would stretch the axis.
  const calmRange = (chart, scale) => {
    const shown = chart.lines.filter((line) => !hidden.has(line.key));
    const calm = shown.filter((line) => line.frames);
    if (!calm.length || calm.length === shown.length) return {};
    const measure = scale === "log" ? Math.log10 : (value) => value;
    const levels = chart.level ? [chart.level.value] : [];
    const heights = [...levels, ...calm.flatMap((line) => line.y[chosen(chart, "y")])]
      .filter((value) => value !== null && (scale !== "log" || value > 0))
      .map(measure);
    if (!heights.length) return {};
    const [low, high] = [Math.min(...heights), Math.max(...heights)];
    const margin = 0.06 * (high - low || 1);
    return { range: [low - margin, high + margin] };
  };

  const levelLine = (chart, scale) => {
    const { level } = chart;
    if (!level || chosen(chart, "y") !== Object.keys(chart.y)[0]) return {};
    if (scale === "log" && level.value <= 0) return {};
    const y = scale === "log" ? Math.log10(level.value) : level.value;
    const place = { xref: "paper", yref: "y" };
    const line = { color: colour("quiet"), width: 1 };
    const font = { color: colour("quiet"), size: 12 };
    const text = `${level.name} ${number(level.value)}`;
    return {
      shapes: [{ type: "line", ...place, x0: 0, x1: 1, y0: level.value, y1: level.value, line }],
      annotations: [{ ...place, x: 0, xanchor: "left", y, yanchor: "bottom", text, showarrow: false, font }],
    };
  };

  const layoutOf = (chart) => {
    const scale = scaleOf(chart);
    const isBar = chart.kind === "bar";
    const axis = {
      gridcolor: colour("grid"),
      linecolor: colour("rule"),
      zerolinecolor: colour("rule"),
      tickcolor: colour("rule"),
      exponentformat: "power",
      automargin: true,
    };
    const height = chart.y[chosen(chart, "y")];
    const corner = { x: 0, xref: "paper", xanchor: "left", y: 0.99, yanchor: "top" };
    const label = { color: colour("ink"), size: 13 };
    return {
      uirevision: [chosen(chart, "x"), chosen(chart, "y"), scale].join(),
      font: { family: getComputedStyle(document.body).fontFamily, ...label },
      width: onScreen ? PAPER_WIDTH : undefined,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 48, r: 12, t: isBar ? 8 : 34, b: 48 },
      title: { ...corner, text: escape(height), font: { size: 14, weight: 600 } },
      xaxis: {
        ...axis,
        type: chart.x_scale,
        // Few enough for a logarithmic axis to label powers of ten only.
        nticks: chart.x_scale === "log" ? 4 : 0,
        tickformat: chart.x_scale === "log" ? "~g" : "",
        zeroline: isBar,
        title: { text: chart.x[chosen(chart, "x")], standoff: 8 },
        ticks: "outside",
        showgrid: isBar,
        rangemode: isBar ? "tozero" : "normal",
        showline: !isBar,
      },
      yaxis: isBar
        ? { ...axis, type: "category", autorange: "reversed", ticksuffix: "  " }
        : { ...axis, type: scale, nticks: scale === "log" ? 5 : 0, zeroline: false, ...calmRange(chart, scale) },
      showlegend: false,
      bargap: 0.3,
      hovermode: "closest",
      hoverdistance: 30,
      hoverlabel: { bgcolor: colour("raised"), bordercolor: colour("rule"), font: label, align: "left" },
      // On touch screens a drag scrolls the page.
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      modebar: { color: colour("quiet"), activecolor: colour("accent"), bgcolor: "rgba(0,0,0,0)" },
      ...levelLine(chart, scale),
    };
  };

  const config = {
    displaylogo: false,
    responsive: true,
    // Named one by one: Plotly's default includes a button that uploads the chart to its server.
    modeBarButtons: [["toImage"], ["zoom2d", "pan2d", "resetScale2d"]],
    showSendToCloud: false,
    plotlyServerURL: "",
  };

  const draw = (chart) => {
    const trace = chart.kind === "bar" ? barTrace : lineTrace;
    const place = document.getElementById(chart.id);
    if (chart.kind === "bar") {
      const bars = chart.lines.flatMap((line) => line.y.structure).length;
      place.style.height = `${90 + 30 * bars}px`;
    }
    Plotly.react(place, chart.lines.map((line) => trace(chart, line)), layoutOf(chart), config);
  };
  const drawAll = () => charts.forEach(draw);

  const DASHES = { solid: "", dash: "6 4", dot: "2 3", dashdot: "6 3 2 3", longdash: "9 4", longdashdot: "9 3 2 3" };
  const MARKS = {
    circle: '<circle cx="18" cy="7" r="3.6"/>',
    square: '<rect x="14.6" y="3.6" width="6.8" height="6.8"/>',
    diamond: '<path d="M18 2.4 22.6 7 18 11.6 13.4 7z"/>',
    "triangle-up": '<path d="M18 2.8 22 10H14z"/>',
    "triangle-down": '<path d="M18 11.2 22 4H14z"/>',
    cross: '<path d="M16.6 2.8h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8V8.4h-2.8V5.6h2.8z"/>',
    x: '<path d="m14.6 5 1.4-1.5 2 2 2-2L21.4 5l-2 2 2 2-1.4 1.5-2-2-2 2L14.6 9l2-2z"/>',
    star: '<path d="m18 2 1.4 3.3 3.6.3-2.7 2.4.8 3.5L18 9.6l-3.1 1.9.8-3.5L13 5.6l3.6-.3z"/>',
  };

  const swatch = (chart, line) => {
    const ink = `var(--line-${line.colour})`;
    const mark =
      chart.kind === "bar"
        ? `<rect x="11" width="14" height="14" rx="2" fill="${ink}"/>`
        : `<path d="M0 7h36" stroke="${ink}" stroke-width="2.25" stroke-dasharray="${DASHES[line.dash]}"/>` +
          `<g fill="${ink}">${MARKS[line.symbol]}</g>`;
    return `<svg viewBox="0 0 36 14" aria-hidden="true">${mark}</svg>`;
  };

  const addLegend = (chart) => {
    const legend = document.getElementById(chart.id).parentElement.querySelector(".legend");
    for (const line of chart.lines) {
      const button = legend.appendChild(document.createElement("button"));
      button.type = "button";
      button.innerHTML = swatch(chart, line);
      button.append(line.name);
      button.dataset.key = line.key;
      button.title = "Show or hide";
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => toggleLine(line.key));
    }
  };

  const toggleLine = (key) => {
    if (!hidden.delete(key)) hidden.add(key);
    for (const button of document.querySelectorAll(".legend button")) {
      button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.key)));
    }
    charts.filter((chart) => chart.lines.some((line) => line.key === key)).forEach(draw);
  };

  const hasChoice = {
    x: (chart) => Object.keys(chart.x).length > 1,
    y: (chart) => Object.keys(chart.y).length > 1,
    scale: (chart) => chart.y_scales.length > 1,
  };

  const addChoice = (button) => {
    const { choice: name, value } = button.dataset;
    button.addEventListener("click", () => {
      choice[name] = value;
      for (const other of button.parentElement.children) {
        other.setAttribute("aria-pressed", String(other === button));
      }
      charts.filter(hasChoice[name]).forEach(draw);
    });
  };

  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  const themeButton = document.getElementById("theme");
  const applyTheme = (theme) => {
    if (theme) root.dataset.theme = theme;
    themeButton.setAttribute("aria-pressed", String(isDark()));
    drawAll();
  };

  const copy = async (button) => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected: now copy";
    }
    setTimeout(() => (button.textContent = "Copy"), 2500);
  };

  charts.forEach(addLegend);
  document.querySelectorAll("[data-choice]").forEach(addChoice);
  document.querySelectorAll(".copy").forEach((button) => button.addEventListener("click", () => copy(button)));
  themeButton.addEventListener("click", () => applyTheme(isDark() ? "light" : "dark"));
  prefersDark.addEventListener("change", () => applyTheme());
  addEventListener("beforeprint", () => {
    onScreen = { theme: root.dataset.theme };
    applyTheme("light");
  });
  addEventListener("afterprint", () => {
    const { theme } = onScreen;
    onScreen = null;
    delete root.dataset.theme;
    applyTheme(theme);
    charts.forEach((chart) => Plotly.Plots.resize(chart.id));
  });
  applyTheme();
})();
