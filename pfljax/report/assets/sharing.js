// Who shares models or uses whose models at a round, as a matrix and a graph; and a client's neighbors over rounds.
"use strict";

function makeSharing(d, common) {
  const { n, ids, place, range, last, state, groups, groupOf, tint, shown, scores, sorted, select, tellClient } =
    common;
  const { byId, color, draw, plot } = page,
    sharing = d.sharing;

  // Columns are the owners of the models among the clients on the page, or the shared models.
  const ownModels = sharing.models === null;
  const column = (model) => (ownModels ? place.get(model) : model);
  const numColumns = ownModels ? n : sharing.models;

  function weights(at) {
    // n rows, with one weight per column
    return sharing.used[at].map((flat) => {
      const row = new Float32Array(numColumns);
      for (let a = 0; a < flat.length; a += 2) if (column(flat[a]) !== undefined) row[column(flat[a])] = flat[a + 1];
      return row;
    });
  }

  function cosines(at) {
    // between the clients' rows of W: W W^T for unit rows
    const users = new Map(); // model -> its users, each with its entry of a unit row
    sharing.used[at].forEach((flat, i) => {
      let square = 0;
      for (let a = 1; a < flat.length; a += 2) square += flat[a] ** 2;
      for (let a = 0; a < flat.length; a += 2) {
        if (!users.has(flat[a])) users.set(flat[a], [[], []]);
        users.get(flat[a])[0].push(i);
        users.get(flat[a])[1].push(flat[a + 1] / Math.sqrt(square));
      }
    });
    const out = range(n).map(() => new Float32Array(n));
    for (const [who, share] of users.values()) {
      const members = Int32Array.from(who),
        part = Float32Array.from(share);
      for (let a = 0; a < members.length; a++) {
        const row = out[members[a]],
          own = part[a];
        for (let b = 0; b < members.length; b++) row[members[b]] += own * part[b];
      }
    }
    return out;
  }

  const kept = { key: "", values: null };
  function values() {
    // for the selected round and kind
    const key = `${state.kind} ${state.at}`;
    if (kept.key !== key)
      Object.assign(kept, { key, values: state.kind === "sharing" ? cosines(state.at) : weights(state.at) });
    return kept.values;
  }

  const square = () => state.kind === "sharing" || ownModels;
  const named = (j) => (square() ? `client ${ids[j]}` : `model ${j}`);
  const order = () => sorted[state.by];
  const strongest = (i, row, most) =>
    range(row.length)
      .filter((j) => row[j] > 0.01 && !(square() && j === i))
      .sort((a, b) => row[b] - row[a])
      .slice(0, most);

  function matrix() {
    const all = values(),
      rows = order(),
      columns = square() ? rows : range(numColumns);
    const z = rows.map((i) => Float32Array.from(columns, (j) => all[i][j]));
    const at = rows.indexOf(state.client),
      ticks = n <= 40 && window.innerWidth > 600;
    const lines = [];
    const boundary = state.by === "group" ? d.group : state.by === "found" ? sharing.found : null;
    if (boundary)
      rows.forEach((i, k) => {
        if (k && boundary[i] !== boundary[rows[k - 1]]) lines.push(k - 0.5);
      });
    const rule = (k, way) => ({
      type: "line",
      line: { color: "#999", width: 1 },
      ...(way === "row"
        ? { x0: -0.5, x1: columns.length - 0.5, y0: k, y1: k }
        : { x0: k, x1: k, y0: -0.5, y1: n - 0.5 }),
    });
    const starts = range(n).filter((k) => !k || d.group[rows[k]] !== d.group[rows[k - 1]]); // where runs of one group start
    const strip =
      groups.length > 1 && starts.length <= 300
        ? starts.map((k, a) => ({
            type: "rect",
            xref: "x domain",
            x0: -0.03,
            x1: -0.008,
            y0: k - 0.5,
            y1: (starts[a + 1] ?? n) - 0.5,
            fillcolor: tint(rows[k]),
            line: { width: 0 },
          }))
        : [];
    const picked = {
      type: "rect",
      x0: -0.5,
      x1: columns.length - 0.5,
      y0: at - 0.5,
      y1: at + 0.5,
      line: { color: page.pick(), width: 2 },
    };
    const relation = state.kind === "sharing" ? "cosine" : "weight";
    return {
      data: [
        {
          type: "heatmap",
          z,
          zmin: 0,
          zmax: state.kind === "sharing" ? 1 : sharing.largest,
          colorscale: page.scale(),
          x: columns.map((j) => (square() ? `${ids[j]}` : `${j}`)),
          y: rows.map((i) => `${ids[i]}`),
          hovertemplate: `client %{y}, ${square() ? "client" : "model"} %{x}: ${relation} %{z:.2f}<extra></extra>`,
          colorbar: {
            orientation: "h",
            thickness: 10,
            len: 0.6,
            ypad: 0,
            y: -0.12,
            yanchor: "top",
            title: { text: relation, side: "top" },
          },
        },
      ],
      layout: {
        margin: { l: 48, r: 8, t: 8, b: 96 },
        shapes: [
          ...strip,
          ...lines.map((k) => rule(k, "row")),
          ...(square() ? lines.map((k) => rule(k, "column")) : []),
          picked,
        ],
        xaxis: {
          type: "category",
          showgrid: false,
          ticks: "",
          showticklabels: columns.length <= 40,
          tickmode: columns.length <= 10 || ticks ? "linear" : "auto",
          tickangle: 0,
          tickfont: { size: columns.length > 20 ? 9 : 12 },
          title: { text: square() ? "client" : "model" },
          ...(square() ? { constrain: "domain" } : {}),
        },
        yaxis: {
          type: "category",
          autorange: "reversed",
          showgrid: false,
          ticks: "",
          showticklabels: n <= 40,
          tickmode: ticks ? "linear" : "auto",
          ticklabelstandoff: 14,
          tickfont: { size: n > 20 ? 9 : 12 },
          title: { text: "client", standoff: n <= 40 ? 8 : 24 },
          ...(square() ? { scaleanchor: "x", constrain: "domain" } : {}),
        },
      },
      click: (point) => select(place.get(Number(point.y))),
    };
  }

  function graph() {
    const all = values();
    return drawRing({
      ...common,
      ring: order(),
      models: square() ? 0 : numColumns,
      label: (i) => [`client ${ids[i]}`, groupOf(i), shown(scores[i])].filter(Boolean).join(", "),
      value: (i, j) => all[i][j] / (state.kind === "sharing" ? 1 : Math.max(sharing.largest, 1e-9)),
      partners: (i) => strongest(i, all[i], 3),
    });
  }

  function tellRound() {
    const round = sharing.rounds[state.at];
    byId("round-shown").textContent = `round ${round}`;
    byId("round").setAttribute("aria-valuetext", `round ${round}`);
    if (state.kind !== "sharing" || groups.length < 2) {
      byId("cosines").textContent = "";
      return;
    }
    const all = values(),
      sum = [0, 0],
      count = [0, 0];
    for (let i = 0; i < n; i++)
      for (let j = 0; j < i; j++) {
        const across = d.group[i] === d.group[j] ? 0 : 1;
        sum[across] += all[i][j];
        count[across]++;
      }
    const mean = (which) => (sum[which] / count[which]).toFixed(2);
    const within = count[0] ? `${mean(0)} within true groups, ` : ""; // if any group has two clients
    byId("cosines").textContent = `Round ${round}: mean cosine ${within}${mean(1)} between different groups.`;
  }

  function moveTo(at) {
    state.at = at;
    byId("round").value = at;
    tellRound();
    ["matrix", "graph"].forEach(draw);
    tellClient();
  }

  function start() {
    const slider = byId("round"),
      play = byId("play");
    slider.max = sharing.rounds.length - 1;
    slider.addEventListener("input", () => moveTo(Number(slider.value)));
    let timer = 0;
    const stop = () => {
      clearInterval(timer);
      timer = 0;
      play.textContent = "Play";
    };
    play.addEventListener("click", () => {
      if (timer) {
        stop();
        return;
      }
      play.textContent = "Stop";
      if (state.at === sharing.rounds.length - 1) moveTo(0);
      timer = setInterval(() => {
        if (state.at + 1 < sharing.rounds.length) moveTo(state.at + 1);
        else stop();
      }, 700);
    });
    for (const [id, key] of [
      ["kind", "kind"],
      ["order", "by"],
    ]) {
      state[key] = byId(id).value;
      byId(id).addEventListener("change", () => {
        state[key] = byId(id).value;
        moveTo(state.at);
        draw("neighbors");
      });
    }
    plot("matrix", matrix);
    plot("graph", graph);
    moveTo(state.at);
  }

  function rowAt(at, i) {
    // only the client's own row of the matrix at a round
    if (state.kind !== "sharing") return weights(at)[i];
    const own = new Map(),
      flat = sharing.used[at],
      row = new Float32Array(n);
    for (let a = 0; a < flat[i].length; a += 2) own.set(flat[i][a], flat[i][a + 1]);
    flat.forEach((other, j) => {
      let dot = 0,
        square = 0;
      for (let a = 0; a < other.length; a += 2) {
        dot += (own.get(other[a]) || 0) * other[a + 1];
        square += other[a + 1] ** 2;
      }
      row[j] = dot / (Math.sqrt(square) || 1);
    });
    const length = Math.sqrt([...own.values()].reduce((sum, w) => sum + w * w, 0)) || 1;
    return row.map((value) => value / length);
  }

  function neighbors() {
    const i = state.client,
      rows = range(sharing.rounds.length).map((at) => rowAt(at, i));
    const most = Float32Array.from(range(rows[0].length), (j) => rows.reduce((sum, row) => sum + row[j], 0));
    const chosen = [...new Set([...strongest(i, last(rows), 4), ...strongest(i, most, 6)])].slice(0, 6);
    const data = chosen.map((j, k) => ({
      type: "scatter",
      mode: "lines+markers",
      x: sharing.rounds,
      y: rows.map((row) => row[j]),
      name: square() && groupOf(j) ? `${named(j)} (${groupOf(j)})` : named(j),
      marker: { symbol: page.SYMBOLS[k], size: 8 },
      line: { color: square() ? tint(j) : color(j, numColumns) },
    }));
    return {
      data,
      layout: {
        xaxis: { title: { text: "round" } },
        showlegend: true,
        yaxis: { title: { text: state.kind === "sharing" ? "cosine of weights" : "weight" }, rangemode: "tozero" },
      },
    };
  }

  return { start, rowAt, strongest, named, neighbors };
}
