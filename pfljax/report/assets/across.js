// The page of a comparison: one point per run, and methods' curves.
"use strict";

page.start((d) => {
  const { byId, color, draw, plain, plot } = page;
  const percent = d.score === "accuracy",
    num = d.methods.length;
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  const tint = (k) => color(k, num),
    short = (title) => plain(title.length > 24 ? `…${title.slice(-23)}` : title);
  const isShare = (name) => percent && (name === "score" || name === "decile");

  function dots() {
    const name = byId("measure").value;
    const data = d.methods.map((method, k) => {
      const known = method.points[name].map((value, i) => [value, i]).filter(([value]) => value !== null);
      return {
        type: "scatter",
        mode: "markers",
        showlegend: false,
        x: known.map(([value]) => value),
        y: known.map(() => k),
        customdata: known.map(([, i]) => [k, i]),
        text: known.map(([, i]) => plain(`${method.title}, ${method.runs[i]}`)),
        hovertemplate: `%{text}: %{x${isShare(name) ? ":.1%" : ":.4g"}}<extra></extra>`,
        marker: { color: tint(k), symbol: page.SYMBOLS[k % 8], size: 11, opacity: 0.85 },
      };
    });
    const shapes = d.methods.flatMap((method, k) => {
      const known = method.points[name].filter((value) => value !== null);
      return known.length
        ? [
            {
              type: "line",
              x0: mean(known),
              x1: mean(known),
              y0: k - 0.32,
              y1: k + 0.32,
              line: { color: tint(k), width: 3 },
            },
          ]
        : [];
    });
    byId("dots").style.height = `${Math.max(14, 6 + 2 * num)}rem`;
    return {
      data,
      layout: {
        shapes,
        xaxis: {
          title: { text: d.names[name] },
          ...(isShare(name) ? { tickformat: ".0%" } : { rangemode: "tozero" }),
        },
        yaxis: {
          tickmode: "array",
          tickvals: d.methods.map((_, k) => k),
          ticktext: d.methods.map((m) => short(m.title)),
          range: [num - 0.4, -0.6],
        },
      },
      click: (point) => {
        const [k, i] = point.customdata;
        window.location.href = d.methods[k].links[i];
      },
    };
  }

  function over() {
    const against = byId("against").value;
    const label = { rounds: "round", traffic: "MB received and sent per client", time: "seconds of training" }[
      against
    ];
    const data = d.methods.flatMap((method, k) => {
      const x = { rounds: method.rounds, traffic: method.megabytes, time: method.time }[against];
      const at = method.rounds.map((_, t) =>
        method.curves.map((curve) => curve[t]).filter((value) => value !== null),
      );
      const middle = at.map((values) => (values.length ? mean(values) : null));
      const spread = at.map((values, t) => Math.sqrt(mean(values.map((value) => (value - middle[t]) ** 2)) || 0));
      const edge = (sign) => middle.map((value, t) => (value === null ? null : value + sign * spread[t]));
      const shared = { type: "scatter", x, legendgroup: `${k}` };
      const band =
        method.curves.length < 2
          ? []
          : [
              { ...shared, mode: "lines", y: edge(-1), line: { width: 0 }, hoverinfo: "skip", showlegend: false },
              {
                ...shared,
                mode: "lines",
                y: edge(1),
                line: { width: 0 },
                fill: "tonexty",
                opacity: 0.15,
                fillcolor: faint(tint(k)),
                hoverinfo: "skip",
                showlegend: false,
              },
            ];
      return [
        ...band,
        {
          ...shared,
          mode: method.rounds.length > 60 ? "lines" : "lines+markers",
          y: middle,
          name: short(method.title),
          line: { color: tint(k), width: 2 },
          marker: { symbol: page.SYMBOLS[k % 8], size: 7 },
        },
      ];
    });
    return {
      data,
      layout: {
        xaxis: { title: { text: label } },
        showlegend: true,
        margin: { l: 50, r: 12, t: 12, b: 44 },
        yaxis: { title: { text: percent ? "test accuracy" : "test loss" }, ...(percent ? { tickformat: ".0%" } : {}) },
      },
    };
  }

  const faint = (text) => {
    const parts = text.startsWith("#")
      ? [1, 3, 5].map((a) => parseInt(text.slice(a, a + 2), 16))
      : text.match(/\d+/g);
    return `rgba(${parts.slice(0, 3).join(",")},0.18)`;
  };

  plot("dots", dots);
  plot("over", over);
  byId("measure").addEventListener("change", () => draw("dots"));
  byId("against").addEventListener("change", () => draw("over"));
  const names = Object.keys(d.names);
  byId("csv-runs").addEventListener("click", () =>
    page.download("runs.csv", [
      ["method", "run", ...names.map((name) => d.names[name])],
      ...d.methods.flatMap((m) => m.runs.map((run, i) => [m.title, run, ...names.map((name) => m.points[name][i])])),
    ]),
  );
  byId("csv-curves").addEventListener("click", () =>
    page.download("curves.csv", [
      ["method", "run", "round", d.score],
      ...d.methods.flatMap((m) =>
        m.runs.flatMap((run, i) => m.rounds.map((round, t) => [m.title, run, round, m.curves[i][t]])),
      ),
    ]),
  );
});
