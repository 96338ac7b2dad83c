// The page of a run: what is shown of the selected client and round. content.py makes the data.
"use strict";

page.hooks.show = (d) => {
  const { byId, draw, drawn, pick, plain, plot, hooks } = page;
  const { clients, sharing } = d,
    n = clients.length;
  const range = (num) => Array.from({ length: num }, (_, i) => i);
  const place = new Map(clients.map((id, i) => [id, i]));
  const state = { client: d.orders.score[0], at: sharing ? sharing.rounds.length - 1 : 0, kind: "sharing", by: "group" };

  // --- The matrix of a round: rows of weights, or their cosines -----------------------------------------------------

  const ownModels = sharing && sharing.models === null;
  const column = (model) => (ownModels ? place.get(model) : model);
  const ofClients = () => state.kind === "sharing" || ownModels;
  const nameOf = (j) => (ofClients() ? `client ${clients[j]}` : `model ${j}`);
  const own = sharing ? new Float32Array(sharing.width) : null; // zero between calls

  function each(flat, visit) {
    // flat: models, each followed by its weight
    for (let a = 0; a < flat.length; a += 2) visit(flat[a], flat[a + 1]);
  }

  function weightsOf(at, i) {
    const row = new Float32Array(ownModels ? n : sharing.models);
    each(sharing.rows[at][i], (model, weight) => {
      if (column(model) !== undefined) row[column(model)] = weight;
    });
    return row;
  }

  function cosinesOf(at, i) {
    const rows = sharing.rows[at],
      lengths = sharing.lengths[at];
    each(rows[i], (model, weight) => (own[model] = weight));
    const out = Float32Array.from(rows, (flat, j) => {
      let sum = 0;
      for (let a = 0; a < flat.length; a += 2) sum += own[flat[a]] * flat[a + 1];
      return sum / (lengths[i] * lengths[j]);
    });
    each(rows[i], (model) => (own[model] = 0));
    return out;
  }

  const rowOf = (at, i) => (state.kind === "sharing" ? cosinesOf(at, i) : weightsOf(at, i));
  const kept = { key: "", rows: [] };
  function matrix() {
    const key = `${state.kind} ${state.at}`;
    if (kept.key !== key) Object.assign(kept, { key, rows: range(n).map((i) => rowOf(state.at, i)) });
    return kept.rows;
  }
  const panel = () => d.panels.matrix[`${state.kind} ${state.by}`];

  function drawMatrix() {
    const all = matrix(),
      rows = d.orders[state.by],
      columns = ofClients() ? rows : range(sharing.models);
    const z = rows.map((i) => Float32Array.from(columns, (j) => all[i][j]));
    return { ...page.heat(panel(), z, rows.indexOf(state.client)), key: (point) => place.get(Number(point.y)) };
  }

  // The strongest links of client i in a row of the matrix.
  const strongest = (i, row, most) =>
    range(row.length)
      .filter((j) => row[j] > 0.01 && !(ofClients() && j === i))
      .sort((a, b) => row[b] - row[a])
      .slice(0, most);

  // --- The graph of a round: clients on a ring, in the order of the matrix. Curves connect each client to its strongest
  // links. Models that all clients share are squares inside the ring.

  function drawGraph() {
    const ring = d.orders[state.by],
      all = matrix(),
      largest = panel().heat.limits[1],
      models = ofClients() ? 0 : sharing.models,
      many = n > 150,
      ink = page.isDark() ? "#b8c7cf" : "#44545d";
    const circle = (num, radius) =>
      range(num).map((k) => [radius * Math.sin((2 * Math.PI * k) / num), radius * Math.cos((2 * Math.PI * k) / num)]);
    const outer = new Map(circle(n, 1).map((at, k) => [ring[k], at])),
      inner = circle(models, models > 1 ? 0.4 : 0),
      bend = models ? 0.7 : 0.35;
    const curves = (color, width, pairs) => {
      const line = { x: [], y: [], color, width, kind: "line" };
      for (const [i, j] of pairs) {
        const [from, to] = [outer.get(i), models ? inner[j] : outer.get(j)];
        for (const t of [0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1])
          ["x", "y"].forEach((name, axis) =>
            line[name].push(
              (1 - t) ** 2 * from[axis] + t * (1 - t) * bend * (from[axis] + to[axis]) + t ** 2 * to[axis],
            ),
          );
        line.x.push(null);
        line.y.push(null);
      }
      return line;
    };
    const links = range(n).flatMap((i) => strongest(i, all[i], 3).map((j) => [i, j])),
      level = ([i, j]) => Math.min(4, Math.ceil(4 * (all[i][j] / largest - 1e-6))),
      fade = (share) => Math.round(255 * share * (many ? 0.35 : 0.8)).toString(16).padStart(2, "0");
    const nodes = { kind: "points", symbol: "circle", size: many ? 4 : 8, keys: ring };
    const [x, y] = [0, 1].map((axis) => ring.map((i) => outer.get(i)[axis]));
    const side = (value, low, middle, high) => (value > 0.4 ? high : value < -0.4 ? low : middle);
    const hidden = { label: "" };
    const made = drawn({
      x: hidden,
      y: hidden,
      series: [
        ...[1, 2, 3, 4].map((k) =>
          curves(ink + fade(k / 4), 0.6 + 0.4 * k, links.filter((pair) => pair[0] !== state.client && level(pair) === k)),
        ),
        curves(pick(), 3, links.filter((pair) => pair[0] === state.client)),
        { kind: "points", x: inner.map((at) => at[0]), y: inner.map((at) => at[1]), symbol: "square", size: 9, color: ink },
        { ...nodes, x, y, color: ring.map((i) => d.colors[i]) },
      ],
    });
    const [squares, ringed] = made.data.slice(-2);
    Object.assign(squares, { mode: "markers+text", text: range(models).map((j) => `model ${j}`), textposition: "top center" });
    if (n <= 40)
      Object.assign(ringed, {
        mode: "markers+text",
        text: ring.map((i) => `${clients[i]}`),
        textposition: x.map((_, k) => `${side(y[k], "bottom", "middle", "top")} ${side(x[k], "left", "center", "right")}`),
      });
    const bare = { visible: false, range: [-1.25, 1.25] };
    Object.assign(made.layout, { margin: { l: 4, r: 4, t: 4, b: 4 }, xaxis: bare, yaxis: { ...bare, scaleanchor: "x" } });
    return made;
  }

  // --- A round ------------------------------------------------------------------------------------------------------

  function moveTo(at) {
    state.at = at;
    byId("round").value = at;
    const round = `round ${sharing.rounds[at]}`;
    byId("round-shown").textContent = round;
    byId("round").setAttribute("aria-valuetext", round);
    byId("cosines").textContent = state.kind === "sharing" ? sharing.cosines[at] : "";
    ["matrix", "graph"].forEach(draw);
    describeClient();
  }

  function startRounds() {
    const last = sharing.rounds.length - 1,
      play = byId("play");
    byId("round").max = last;
    byId("round").addEventListener("input", () => moveTo(Number(byId("round").value)));
    let timer = 0;
    const stop = () => {
      clearInterval(timer);
      timer = 0;
      play.textContent = "Play";
    };
    play.addEventListener("click", () => {
      if (timer) return stop();
      play.textContent = "Stop";
      if (state.at === last) moveTo(0);
      timer = setInterval(() => (state.at < last ? moveTo(state.at + 1) : stop()), 700);
    });
    for (const name of ["kind", "by"]) {
      state[name] = byId(name).value;
      byId(name).addEventListener("change", () => {
        state[name] = byId(name).value;
        moveTo(state.at);
        draw("neighbors");
      });
    }
    plot("matrix", drawMatrix);
    plot("graph", drawGraph);
    plot("neighbors", drawNeighbors);
  }

  // --- A client -----------------------------------------------------------------------------------------------------

  function drawCurves() {
    const i = state.client,
      line = (x, y, name, more) => ({ kind: "line", x, y, name, color: pick(), symbol: "circle", size: 5, ...more });
    const series = [line(d.rounds, d.test[i], `client ${clients[i]}, test`, { width: 3 })];
    if (d.train) series.push(line(d.rounds, d.train[i], "training examples", { dash: "dot", width: 2 }));
    series.push({ ...line(d.rounds, d.median, "median client", { dash: "dash", width: 2 }), color: "#56B4E9", symbol: "" });
    return drawn({ x: { label: "round" }, y: d.score, series });
  }

  function drawLabels() {
    const own = d.labels[state.client],
      classes = range(own.length).map(String);
    const share = (counts) => counts.map((count) => count / (counts.reduce((a, b) => a + b, 0) || 1));
    const bar = (counts, name, color) => ({
      type: "bar",
      x: classes,
      y: share(counts),
      name,
      marker: { color },
      customdata: counts,
      hovertemplate: "class %{x}: %{customdata} examples<extra></extra>",
    });
    const made = drawn({ x: { label: "class" }, y: { label: "share of training examples", percent: true }, series: [] });
    made.data = [bar(own, `client ${clients[state.client]}`, pick()), bar(d.all_labels, "all clients", "#56B4E9")];
    made.key = () => undefined;
    Object.assign(made.layout, { showlegend: true, xaxis: { ...made.layout.xaxis, type: "category" } });
    return made;
  }

  function drawNeighbors() {
    const i = state.client,
      rows = range(sharing.rounds.length).map((at) => rowOf(at, i)),
      last = rows[rows.length - 1];
    // The strongest links of the last round count as much as those of all rounds.
    const most = last.map((value, j) => value + rows.reduce((sum, row) => sum + row[j], 0) / rows.length);
    const series = strongest(i, most, 6).map((j, k) => ({
      kind: "line",
      x: sharing.rounds,
      y: rows.map((row) => row[j]),
      name: nameOf(j) + (ofClients() ? d.groups[j] : ""),
      symbol: sharing.symbols[k],
      size: 6,
      width: 2,
      color: ofClients() ? d.colors[j] : sharing.colors[j],
    }));
    const made = drawn({ x: { label: "round" }, y: { label: panel().heat.label }, series });
    made.layout.yaxis.rangemode = "tozero";
    return made;
  }

  function describeClient() {
    const i = state.client;
    let text = d.sentences[i];
    if (sharing) {
      const row = rowOf(state.at, i),
        near = strongest(i, row, 3).map((j) => `${nameOf(j)} (${row[j].toFixed(2)})`);
      const [lead, none] =
        state.kind === "sharing"
          ? ["Shares models most with", "Shares models with no one"]
          : ["Uses most", "Uses nobody else's model"];
      text += ` ${near.length ? `${lead} ${near.join(", ")}` : none} in round ${sharing.rounds[state.at]}.`;
    }
    byId("client-text").textContent = text;
  }

  hooks.select = (i) => {
    state.client = hooks.selected = i;
    byId("client").value = String(i);
    document.querySelectorAll("tr.picked").forEach((row) => row.classList.remove("picked"));
    const button = document.querySelector(`#clients-table button[data-client="${clients[i]}"]`);
    if (button) button.closest("tr").classList.add("picked");
    describeClient();
    ["curves", "labels", "neighbors", "matrix", "graph", "ranking"].forEach(draw);
  };

  function startClient() {
    const list = byId("client"),
      table = byId("clients-table");
    d.names.forEach((name, i) => list.append(new Option(name, i)));
    list.addEventListener("change", () => hooks.select(Number(list.value)));
    byId("previous").addEventListener("click", () => hooks.select((state.client + n - 1) % n));
    byId("next").addEventListener("click", () => hooks.select((state.client + 1) % n));
    if (table)
      table.addEventListener("click", (event) => {
        const button = event.target.closest("button[data-client]");
        if (!button) return;
        hooks.select(place.get(Number(button.dataset.client)));
        byId("client-text").scrollIntoView({ block: "center" });
      });
    plot("curves", drawCurves);
    if (d.labels) plot("labels", drawLabels);
  }

  d.csv.scores = () => [
    ["client", "round", d.score.name],
    ...clients.flatMap((id, i) => d.rounds.map((round, t) => [id, round, d.test[i][t]])),
  ];
  if (sharing) startRounds();
  startClient();
  hooks.select(state.client); // the worst one
  if (sharing) moveTo(state.at);
};
