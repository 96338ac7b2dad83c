// The graph of a round: clients on a ring, in the order of the matrix. Curves connect each client to its strongest
// links. Models that all clients share are squares inside the ring.
"use strict";

function drawRing({ n, ids, ring, models, state, range, last, tint, label, value, partners, select }) {
  const many = n > 150;
  const angle = new Map(ring.map((i, k) => [i, (2 * Math.PI * k) / n]));
  const at = (i, r = 1) => [r * Math.sin(angle.get(i)), r * Math.cos(angle.get(i))];
  const inner = (j) => {
    const a = (2 * Math.PI * j) / models,
      r = models > 1 ? 0.4 : 0;
    return [r * Math.sin(a), r * Math.cos(a)];
  };
  const end = (j) => (models ? inner(j) : at(j));
  const classes = [0.25, 0.5, 0.75, 1].map((level) => ({ level, x: [], y: [] })),
    own = { x: [], y: [] };
  const curve = (list, i, j) => {
    const [x0, y0] = at(i),
      [x1, y1] = end(j),
      bend = models ? 0.7 : 0.35;
    for (const t of [0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1]) {
      const a = (1 - t) ** 2,
        b = 2 * t * (1 - t),
        c = t ** 2;
      list.x.push(a * x0 + (b * bend * (x0 + x1)) / 2 + c * x1);
      list.y.push(a * y0 + (b * bend * (y0 + y1)) / 2 + c * y1);
    }
    list.x.push(null);
    list.y.push(null);
  };
  range(n).forEach((i) =>
    partners(i).forEach((j) => {
      const entry = classes.find(({ level }) => value(i, j) <= level + 1e-6) || last(classes);
      curve(i === state.client ? own : entry, i, j);
    }),
  );
  const line = (list, settings) => ({
    type: "scatter",
    mode: "lines",
    x: list.x,
    y: list.y,
    hoverinfo: "skip",
    showlegend: false,
    line: settings.line,
    opacity: settings.opacity,
  });
  const ink = page.isDark() ? "#b8c7cf" : "#44545d",
    fade = many ? 0.35 : 0.8;
  const [x, y] = [0, 1].map((axis) => ring.map((i) => at(i)[axis]));
  const nodes = {
    type: "scatter",
    mode: n <= 40 ? "markers+text" : "markers",
    x,
    y,
    customdata: ring,
    text: ring.map((i) => `${ids[i]}`),
    textposition: ring.map((i) => {
      const [a, b] = at(i);
      return `${b > 0.5 ? "top" : b < -0.5 ? "bottom" : "middle"} ${a > 0.3 ? "right" : a < -0.3 ? "left" : "center"}`;
    }),
    hovertext: ring.map(label),
    hoverinfo: "text",
    showlegend: false,
    marker: {
      color: ring.map(tint),
      size: ring.map((i) => (i === state.client ? 18 : many ? 6 : 12)),
      line: { width: ring.map((i) => (i === state.client ? 3 : 0)), color: page.pick() },
      opacity: 1,
    },
  };
  const squares = !models
    ? []
    : [
        {
          type: "scatter",
          mode: "markers+text",
          showlegend: false,
          hoverinfo: "text",
          x: range(models).map((j) => inner(j)[0]),
          y: range(models).map((j) => inner(j)[1]),
          text: range(models).map((j) => `model ${j}`),
          textposition: "top center",
          marker: { symbol: "square", size: 13, color: ink },
        },
      ];
  const hidden = { visible: false, range: [-1.25, 1.25] };
  return {
    data: [
      ...classes.map((list) =>
        line(list, { opacity: list.level * fade, line: { color: ink, width: 0.6 + 1.6 * list.level } }),
      ),
      line(own, { opacity: 1, line: { color: page.pick(), width: 3 } }),
      ...squares,
      nodes,
    ],
    layout: { margin: { l: 4, r: 4, t: 4, b: 4 }, xaxis: { ...hidden }, yaxis: { ...hidden, scaleanchor: "x" } },
    click: (point) => {
      if (point.customdata !== undefined) select(point.customdata);
    },
  };
}
