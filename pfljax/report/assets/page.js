// Shared by all pages: unpacks the library and the data; sets the theme; draws plots once they are in view; sorts
// tables; downloads files.
"use strict";

const page = (() => {
  const PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442"]; // Okabe and Ito
  const SYMBOLS = ["circle", "square", "diamond", "cross", "x", "triangle-up", "triangle-down", "star"];
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  const byId = (id) => document.getElementById(id);
  const plots = new Map(); // id -> {make, seen}

  const isDark = () =>
    (document.documentElement.dataset.theme || (prefersDark.matches ? "dark" : "light")) === "dark";

  async function unpack(id) {
    const letters = atob(byId(id).textContent),
      packed = new Uint8Array(letters.length);
    for (let i = 0; i < packed.length; i++) packed[i] = letters.charCodeAt(i);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  // Plotly interprets some HTML in its texts, so names of methods and data sets are escaped.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function color(group, num) {
    if (num <= PALETTE.length) return PALETTE[group % PALETTE.length];
    const share = num > 1 ? group / (num - 1) : 0; // many groups: from light to dark, within the colors of viridis
    const stops = [
      [68, 1, 84],
      [59, 82, 139],
      [33, 145, 140],
      [94, 201, 98],
      [253, 231, 37],
    ];
    const low = Math.min(3, Math.floor(share * 4));
    const mixed = stops[low].map((a, i) => Math.round(a + (stops[low + 1][i] - a) * (share * 4 - low)));
    return `rgb(${mixed})`;
  }

  const touch = window.matchMedia("(pointer: coarse)").matches;

  const pick = () => (isDark() ? "#ff8fd0" : "#b0006d"); // color of the selected client, distinct from the groups' colors

  // From low to high, by lightness alone.
  const scale = () =>
    isDark()
      ? [
          [0, "#14191d"],
          [0.5, "#2a788e"],
          [1, "#fde725"],
        ]
      : [
          [0, "#ffffff"],
          [0.5, "#5aa5d0"],
          [1, "#08264a"],
        ];

  function layout(changes) {
    const grid = "rgba(128,128,128,0.28)",
      ink = getComputedStyle(document.body).color;
    const axis = (given) => ({
      gridcolor: grid,
      zeroline: false,
      automargin: true,
      ...given,
      title: { standoff: 8, ...(given || {}).title },
    });
    return {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, size: 13 },
      margin: { l: 50, r: 12, t: 12, b: 44 },
      hovermode: "closest",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: ink },
      dragmode: touch ? false : "zoom",
      legend: { orientation: "h", y: -0.22, yanchor: "top" },
      ...changes,
      xaxis: axis(changes.xaxis),
      yaxis: axis(changes.yaxis),
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
    if (made.click && !entry.clicks) {
      entry.clicks = true;
      target.on("plotly_click", (event) => made.click(event.points[0]));
    }
  }

  const watcher = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        const entry = plots.get(target.id);
        if (!isIntersecting || entry.seen) continue;
        entry.seen = true;
        watcher.unobserve(target);
        draw(target.id);
      }
    },
    { rootMargin: "300px" },
  );

  function plot(id, make) {
    // make() -> {data, layout, click(point)}
    if (!byId(id)) return;
    plots.set(id, { make, seen: false, clicks: false });
    watcher.observe(byId(id));
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

  async function start(show) {
    try {
      startTheme();
      document.querySelectorAll("table.sortable").forEach(makeSortable);
      const [library, data] = await Promise.all([unpack("library"), unpack("data")]);
      const script = document.createElement("script");
      script.textContent = library;
      document.head.append(script);
      show(JSON.parse(data));
      document.documentElement.dataset.ready = "yes";
    } catch (error) {
      byId("problem").textContent =
        `The plots cannot be drawn. They need a browser from 2024 or later. (${error})`;
      byId("problem").hidden = false;
      throw error;
    }
  }

  return { PALETTE, SYMBOLS, byId, color, download, draw, isDark, pick, plain, plot, scale, start };
})();
