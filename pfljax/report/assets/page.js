// Shared by all pages: unpacks the library and the data; sets the theme; draws the panels that picture.py describes,
// once they are in view, and all of them for printing; sorts tables; downloads files.
"use strict";

const page = (() => {
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse)").matches;
  const byId = (id) => document.getElementById(id);
  const NEAR = 300; // pixels below the window within which plots are drawn
  const PAPER = 680; // width of a sheet without its margins, in pixels
  const plots = new Map(); // id -> {make, seen, click}
  let printing = false; // in light colors, and at the width of a sheet
  // A page's script sets `show(data)`, which is called before anything is drawn, and `select(key)`, which is called if a
  // point is clicked; `selected` is the key of the points to highlight, and `texts` is what is said of each key.
  const hooks = { show: () => {}, select: () => {}, selected: null, texts: {} };

  const isDark = () =>
    !printing && (document.documentElement.dataset.theme || (prefersDark.matches ? "dark" : "light")) === "dark";
  const pick = () => (isDark() ? "#ff8fd0" : "#b0006d"); // color of the selected client, distinct from the groups' colors
  const ink = () => (printing ? "#1f2a30" : getComputedStyle(document.body).color);

  async function unpack(id) {
    const packed = Uint8Array.from(atob(byId(id).textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  // --- From a panel's description to Plotly's -----------------------------------------------------------------------

  // Plotly interprets some HTML in its texts, so names of methods and data sets are escaped.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function band({ x, y, low, color }) {
    const known = x.map((_, k) => k).filter((k) => y[k] !== null && low[k] !== null),
      back = [...known].reverse();
    return {
      x: [...known, ...back].map((k) => x[k]),
      y: [...known.map((k) => y[k]), ...back.map((k) => low[k])],
      mode: "lines",
      line: { width: 0 },
      fill: "toself",
      fillcolor: `${color}40`,
      hoverinfo: "skip",
    };
  }

  // A line between two positions, with a cap at each end.
  const interval = ({ x, y, color, width }) => ({
    x,
    y,
    mode: "lines+markers",
    line: { color, width },
    marker: { symbol: "line-ns", size: 13, line: { color, width } },
    hovertemplate: "%{x:.4g}<extra></extra>",
  });

  function markers({ kind, x, y, color, dash, width, symbol, size, keys }) {
    const chosen = (keys || []).map((key) => key === hooks.selected);
    const grown = chosen.some(Boolean) ? chosen.map((is) => (is ? 17 : 1.4 * size)) : 1.4 * size;
    return {
      x,
      y,
      mode: kind === "points" ? "markers" : symbol ? "lines+markers" : "lines",
      line: { color, dash, width },
      marker: {
        color,
        symbol,
        size: grown,
        opacity: 1,
        line: { color: pick(), width: chosen.map((is) => (is ? 3 : 0)) },
      },
      customdata: keys || undefined,
      hovertext: keys ? keys.map((key) => plain(hooks.texts[key])) : undefined,
      hoverinfo: keys ? "text" : undefined,
    };
  }

  function traces(series) {
    // A band without a name belongs to the line of its color.
    const linked = new Set(series.filter((s) => s.kind === "band" && !s.name).map((s) => s.color));
    return series.map((s) => ({
      type: "scatter",
      name: plain(s.name || ""),
      showlegend: Boolean(s.name),
      legendgroup: linked.has(s.color) ? s.color : undefined,
      ...(s.kind === "band" ? band(s) : s.kind === "interval" ? interval(s) : markers(s)),
    }));
  }

  // Breaks a horizontal axis' title into lines that fit the plot; Plotly would cut it off.
  function inLines(label) {
    const most = Math.max(20, Math.floor((Math.min(printing ? PAPER : window.innerWidth, 1200) - 100) / 7.5));
    const lines = [""];
    for (const word of label.split(" ")) {
      const longer = `${lines[lines.length - 1]} ${word}`.trim();
      if (longer.length <= most) lines[lines.length - 1] = longer;
      else lines.push(word);
    }
    return lines.map(plain).join("<br>");
  }

  const axis = ({ label, ticks, percent, log, limits }) => ({
    title: { text: plain(label), standoff: 8 },
    gridcolor: "rgba(128,128,128,0.28)",
    zeroline: false,
    automargin: true,
    ...(percent ? { tickformat: "~%" } : {}),
    ...(log ? { type: "log" } : {}),
    ...(limits ? { range: limits } : {}),
    ...(ticks ? { tickmode: "array", tickvals: ticks.map(([at]) => at), ticktext: ticks.map(([, text]) => plain(text)) } : {}),
  });

  const horizontal = (described) => ({ ...axis(described), title: { text: inLines(described.label), standoff: 8 } });

  const drawn = (panel) => ({
    data: traces(panel.series),
    layout: {
      xaxis: horizontal(panel.x),
      yaxis: axis(panel.y),
      showlegend: panel.series.some((s) => s.name),
    },
  });

  function heat({ x, y, heat: { rows, label, limits, edges, strip, ...given } }, z, chosen) {
    const crossed = !given.columns.length, // columns are ordered like rows
      columns = crossed ? rows : given.columns;
    // From low to high, by lightness alone.
    const shades = isDark() ? ["#14191d", "#2a788e", "#fde725"] : ["#ffffff", "#5aa5d0", "#08264a"];
    const [right, bottom] = [columns.length - 0.5, rows.length - 0.5];
    const box = (x0, x1, y0, y1, more) => ({ type: "rect", x0, x1, y0, y1, line: { width: 0 }, ...more });
    const thin = { line: { color: "#999", width: 1 } };
    const names = (list) => ({
      type: "category",
      showgrid: false,
      ticks: "",
      showticklabels: list.length <= 40,
      tickmode: list.length <= 10 || (list.length <= 40 && window.innerWidth > 600) ? "linear" : "auto",
      tickangle: 0,
      tickfont: { size: list.length > 20 ? 9 : 12 },
      ...(crossed ? { constrain: "domain" } : {}),
    });
    return {
      data: [
        {
          type: "heatmap",
          z,
          zmin: limits[0],
          zmax: limits[1],
          colorscale: shades.map((shade, k) => [k / 2, shade]),
          x: columns,
          y: rows,
          hovertemplate: `client %{y}, ${x.label} %{x}: ${label} %{z:.2f}<extra></extra>`,
          colorbar: {
            orientation: "h",
            thickness: 10,
            len: 0.6,
            ypad: 0,
            y: -0.12,
            yanchor: "top",
            title: { text: label, side: "top" },
          },
        },
      ],
      layout: {
        margin: { l: 48, r: 8, t: 8, b: 96 },
        shapes: [
          ...strip.map(([start, stop, fillcolor]) =>
            box(-0.03, -0.008, start - 0.5, stop - 0.5, { xref: "x domain", fillcolor }),
          ),
          ...edges.map((k) => box(-0.5, right, k, k, thin)),
          ...(crossed ? edges.map((k) => box(k, k, -0.5, bottom, thin)) : []),
          box(-0.5, right, chosen - 0.5, chosen + 0.5, { line: { color: pick(), width: 2 } }),
        ],
        xaxis: { ...axis(x), ...names(columns) },
        yaxis: {
          ...axis(y),
          ...names(rows),
          autorange: "reversed",
          ticklabelstandoff: 14,
          title: { text: y.label, standoff: rows.length <= 40 ? 8 : 24 },
          ...(crossed ? { scaleanchor: "x" } : {}),
        },
      },
    };
  }

  // --- Plots on the page --------------------------------------------------------------------------------------------

  function layout(changes) {
    return {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink(), size: 13 },
      margin: { l: 50, r: 12, t: 12, b: 44 },
      hovermode: "closest",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: ink() },
      dragmode: touch ? false : "zoom",
      legend: { orientation: "h", y: -0.22, yanchor: "top" },
      ...changes,
      ...(printing ? { width: PAPER } : {}),
    };
  }

  function draw(id) {
    const entry = plots.get(id);
    if (!entry || !entry.seen) return;
    const made = entry.make(),
      target = byId(id);
    Plotly.react(target, made.data, layout(made.layout), {
      responsive: true,
      displaylogo: false,
      modeBarButtons: [["toImage", "resetScale2d"]],
      displayModeBar: touch || window.matchMedia("(hover: none)").matches ? false : "hover",
    });
    if (entry.clicks) return;
    entry.clicks = true;
    target.on("plotly_click", ({ points: [point] }) => {
      const key = made.key ? made.key(point) : point.customdata;
      if (typeof key === "string") window.location.href = key;
      else if (key !== undefined) hooks.select(key);
    });
  }

  const watcher = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) if (isIntersecting) see(target.id);
    },
    { rootMargin: `${NEAR}px` },
  );

  function see(id) {
    const entry = plots.get(id);
    if (entry.seen) return;
    entry.seen = true;
    watcher.unobserve(byId(id));
    draw(id);
  }

  function seeAbove(bottom) {
    for (const id of plots.keys()) if (byId(id).getBoundingClientRect().top < bottom) see(id);
  }

  function print(starts) {
    printing = starts;
    for (const id of plots.keys()) draw(id);
    seeAbove(Infinity);
  }

  function plot(id, make) {
    // make() -> {data, layout, key(point)}; the key of a clicked point is by default its custom data
    if (!byId(id)) return;
    plots.set(id, { make, seen: false, clicks: false });
    watcher.observe(byId(id));
  }

  function startPanels(panels) {
    // panels: by plot and by choice; a plot with one panel has the choice ""
    for (const [id, choices] of Object.entries(panels)) {
      const list = document.querySelector(`select[data-plot~="${id}"]`);
      if (!plots.has(id)) plot(id, () => drawn(choices[list ? list.value : ""]));
      if (list) list.addEventListener("change", () => draw(id));
    }
  }

  function setTheme(name) {
    document.documentElement.dataset.theme = name;
    try {
      localStorage.setItem("pfljax-theme", name);
    } catch {
      /* browsers may have no storage for local files */
    }
  }

  function startTheme() {
    const button = byId("theme");
    try {
      document.documentElement.dataset.theme = localStorage.getItem("pfljax-theme") || "";
    } catch {
      /* as above */
    }
    const label = () => {
      button.textContent = isDark() ? "Light" : "Dark";
      button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colors`);
    };
    const redraw = () => {
      label();
      for (const id of plots.keys()) draw(id);
    };
    label();
    button.addEventListener("click", () => {
      setTheme(isDark() ? "light" : "dark");
      redraw();
    });
    prefersDark.addEventListener("change", redraw);
  }

  function value(cell) {
    const text = cell ? cell.textContent.trim() : "",
      number = parseFloat(text.replace(/,/g, ""));
    return Number.isNaN(number) ? text : number;
  }

  function compare(a, b) {
    if (typeof a === typeof b) return typeof a === "number" ? a - b : a.localeCompare(b);
    return typeof a === "number" ? -1 : 1; // numbers first
  }

  function makeSortable(table) {
    const heads = [...table.querySelectorAll("thead th")],
      body = table.tBodies[0];
    heads.forEach((head, place) =>
      head.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...body.rows].map((row) => [value(row.cells[place]), row]);
        rows.sort((a, b) => (down ? compare(b[0], a[0]) : compare(a[0], b[0])));
        body.append(...rows.map(([, row]) => row));
      }),
    );
  }

  const quote = (cell) =>
    /[",\n]/.test(String(cell)) ? `"${String(cell).replace(/"/g, '""')}"` : String(cell ?? "");

  function download(name, lines) {
    // lines: rows of cells
    const url = URL.createObjectURL(new Blob([lines.map((cells) => cells.map(quote).join(",")).join("\n") + "\n"]));
    const link = Object.assign(document.createElement("a"), { href: url, download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  async function start() {
    // A document that stays open delays the load event, for which screenshots wait, until the plots in view are drawn.
    const pending = document.body.appendChild(Object.assign(document.createElement("iframe"), { hidden: true }));
    pending.contentDocument.open();
    try {
      startTheme();
      document.querySelectorAll("table.sortable").forEach(makeSortable);
      const [library, content] = await Promise.all([unpack("library"), unpack("data")]);
      const script = document.createElement("script");
      script.textContent = library;
      document.head.append(script);
      const data = JSON.parse(content);
      hooks.texts = data.texts;
      hooks.show(data);
      startPanels(data.panels);
      for (const [name, lines] of Object.entries(data.csv))
        byId(`csv-${name}`).addEventListener("click", () =>
          download(`${name}.csv`, typeof lines === "function" ? lines() : lines),
        );
      seeAbove(window.innerHeight + NEAR);
      window.addEventListener("beforeprint", () => print(true));
      window.addEventListener("afterprint", () => print(false));
      document.documentElement.dataset.ready = "yes";
    } catch (error) {
      byId("problem").textContent =
        `The plots cannot be drawn. They need a browser from 2024 or later. (${error})`;
      byId("problem").hidden = false;
      throw error;
    } finally {
      pending.contentDocument.close();
      pending.remove();
    }
  }

  window.addEventListener("DOMContentLoaded", start);
  return { axis, byId, draw, drawn, heat, hooks, ink, isDark, pick, plain, plot };
})();
