// The page of a run: who shares models at a round, as a matrix and as a graph; a client; all clients; scores; traffic.
"use strict";

page.start((d) => {
  const { byId, color, draw, plot } = page;
  const n = d.clients.length, ids = d.clients, sharing = d.sharing, percent = d.score === "accuracy";
  const range = (num) => Array.from({ length: num }, (_, i) => i);
  const shown = (value) => (value === null || value === undefined || Number.isNaN(value) ? "not scored"
    : percent ? `${(100 * value).toFixed(1)} %` : value.toPrecision(4));
  const last = (series) => series[series.length - 1];
  const scores = d.test.map(last);
  const word = percent ? "test accuracy" : "test MSE";
  const scoreAxis = { title: { text: word }, ...(percent ? { tickformat: ".0%" } : {}) };
  const groups = [...new Set(d.group)].sort((a, b) => a - b);
  const tint = (i) => color(groups.indexOf(d.group[i]), groups.length);
  const state = { at: sharing ? sharing.rounds.length - 1 : 0, kind: "sharing", by: "group", client: 0 };
  const place = new Map(ids.map((id, i) => [id, i]));

  // --- Who shares models -------------------------------------------------------------------------------------------

  const worst = (a, b) => (scores[a] ?? Infinity) - (scores[b] ?? Infinity);
  const sorted = {
    group: range(n).sort((a, b) => d.group[a] - d.group[b] || a - b),
    found: sharing ? sharing.order : range(n),
    accuracy: range(n).sort(percent ? worst : (a, b) => worst(b, a)),
  };
  // Columns are the clients on the page who own the models, or the models that all share.
  const ownModels = sharing && sharing.models === null;
  const column = (model) => (ownModels ? place.get(model) : model);
  const numColumns = sharing ? (ownModels ? n : sharing.models) : 0;

  function weights(at) { // n rows of a weight for each column
    return sharing.used[at].map((flat) => {
      const row = new Float32Array(numColumns);
      for (let a = 0; a < flat.length; a += 2) if (column(flat[a]) !== undefined) row[column(flat[a])] = flat[a + 1];
      return row;
    });
  }

  function cosines(at) { // of the clients' rows of W: W W^T for rows of length one
    const users = new Map(); // model -> who uses it, each with its share of a row of length one
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
      const members = Int32Array.from(who), part = Float32Array.from(share);
      for (let a = 0; a < members.length; a++) {
        const row = out[members[a]], own = part[a];
        for (let b = 0; b < members.length; b++) row[members[b]] += own * part[b];
      }
    }
    return out;
  }

  const kept = { key: "", values: null };
  function values() { // of the round and the kind that are chosen
    const key = `${state.kind} ${state.at}`;
    if (kept.key !== key) Object.assign(kept, { key, values: state.kind === "sharing" ? cosines(state.at) : weights(state.at) });
    return kept.values;
  }

  const square = () => state.kind === "sharing" || ownModels;
  const named = (j) => (square() ? `client ${ids[j]}` : `model ${j}`);
  const order = () => sorted[state.by];
  const strongest = (i, row, most) => range(row.length).filter((j) => row[j] > 0.01 && !(square() && j === i))
    .sort((a, b) => row[b] - row[a]).slice(0, most);

  function matrix() {
    const all = values(), rows = order(), columns = square() ? rows : range(numColumns);
    const z = rows.map((i) => Float32Array.from(columns, (j) => all[i][j]));
    const at = rows.indexOf(state.client), ticks = n <= 40 && window.innerWidth > 600;
    const lines = [];
    const boundary = state.by === "group" ? d.group : state.by === "found" ? sharing.found : null;
    if (boundary) rows.forEach((i, k) => { if (k && boundary[i] !== boundary[rows[k - 1]]) lines.push(k - 0.5); });
    const rule = (k, way) => ({ type: "line", line: { color: "#999", width: 1 }, ...(way === "row"
      ? { x0: -0.5, x1: columns.length - 0.5, y0: k, y1: k } : { x0: k, x1: k, y0: -0.5, y1: n - 0.5 }) });
    const starts = range(n).filter((k) => !k || d.group[rows[k]] !== d.group[rows[k - 1]]); // of stretches of one group
    const strip = starts.length <= 300 ? starts.map((k, a) => ({ type: "rect", xref: "x domain", x0: -0.03, x1: -0.008,
      y0: k - 0.5, y1: (starts[a + 1] ?? n) - 0.5, fillcolor: tint(rows[k]), line: { width: 0 } })) : [];
    const picked = { type: "rect", x0: -0.5, x1: columns.length - 0.5, y0: at - 0.5, y1: at + 0.5,
      line: { color: page.pick(), width: 2 } };
    const relation = state.kind === "sharing" ? "cosine" : "weight";
    return {
      data: [{ type: "heatmap", z, zmin: 0, zmax: state.kind === "sharing" ? 1 : sharing.largest, colorscale: page.scale(),
        x: columns.map((j) => (square() ? `${ids[j]}` : `${j}`)), y: rows.map((i) => `${ids[i]}`),
        hovertemplate: `client %{y}, ${square() ? "client" : "model"} %{x}: ${relation} %{z:.2f}<extra></extra>`,
        colorbar: { orientation: "h", thickness: 10, len: 0.6, ypad: 0, y: -0.12, yanchor: "top",
          title: { text: relation, side: "top" } } }],
      layout: { margin: { l: 48, r: 8, t: 8, b: 96 },
        shapes: [...strip, ...lines.map((k) => rule(k, "row")), ...(square() ? lines.map((k) => rule(k, "column")) : []), picked],
        xaxis: { type: "category", showgrid: false, ticks: "", showticklabels: columns.length <= 40, tickmode: columns.length <= 10 || ticks ? "linear" : "auto", tickangle: 0,
          tickfont: { size: columns.length > 20 ? 9 : 12 }, title: { text: square() ? "client" : "model" },
          ...(square() ? { constrain: "domain" } : {}) },
        yaxis: { type: "category", autorange: "reversed", showgrid: false, ticks: "", showticklabels: n <= 40, tickmode: ticks ? "linear" : "auto",
          ticklabelstandoff: 14, tickfont: { size: n > 20 ? 9 : 12 }, title: { text: "client", standoff: n <= 40 ? 8 : 24 },
          ...(square() ? { scaleanchor: "x", constrain: "domain" } : {}) } },
      click: (point) => select(place.get(Number(point.y))),
    };
  }

  // Clients on a ring, in the order of the matrix; each is joined to the three that it has most to do with.
  function graph() {
    const all = values(), ring = order(), many = n > 150;
    const angle = new Map(ring.map((i, k) => [i, 2 * Math.PI * k / n]));
    const at = (i, r = 1) => [r * Math.sin(angle.get(i)), r * Math.cos(angle.get(i))];
    const inner = (j) => { const a = 2 * Math.PI * j / numColumns, r = numColumns > 1 ? 0.4 : 0;
      return [r * Math.sin(a), r * Math.cos(a)]; };
    const end = (j) => (square() ? at(j) : inner(j));
    const top = state.kind === "sharing" ? 1 : Math.max(sharing.largest, 1e-9);
    const classes = [0.25, 0.5, 0.75, 1].map((level) => ({ level, x: [], y: [] })), own = { x: [], y: [] };
    const curve = (list, i, j) => {
      const [x0, y0] = at(i), [x1, y1] = end(j), bend = square() ? 0.35 : 0.7;
      for (const t of [0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1]) {
        const a = (1 - t) ** 2, b = 2 * t * (1 - t), c = t ** 2;
        list.x.push(a * x0 + b * bend * (x0 + x1) / 2 + c * x1);
        list.y.push(a * y0 + b * bend * (y0 + y1) / 2 + c * y1);
      }
      list.x.push(null); list.y.push(null);
    };
    range(n).forEach((i) => strongest(i, all[i], 3).forEach((j) => {
      const entry = classes.find(({ level }) => all[i][j] / top <= level + 1e-6) || last(classes);
      curve(i === state.client ? own : entry, i, j);
    }));
    const line = (list, settings) => ({ type: "scatter", mode: "lines", x: list.x, y: list.y, hoverinfo: "skip",
      showlegend: false, line: settings.line, opacity: settings.opacity });
    const ink = page.isDark() ? "#b8c7cf" : "#44545d", fade = many ? 0.35 : 0.8;
    const [x, y] = [0, 1].map((axis) => ring.map((i) => at(i)[axis]));
    const nodes = { type: "scatter", mode: n <= 40 ? "markers+text" : "markers", x, y, customdata: ring,
      text: ring.map((i) => `${ids[i]}`), textposition: ring.map((i) => { const [a, b] = at(i);
        return `${b > 0.5 ? "top" : b < -0.5 ? "bottom" : "middle"} ${a > 0.3 ? "right" : a < -0.3 ? "left" : "center"}`; }),
      hovertext: ring.map((i) => `client ${ids[i]}, group ${d.group[i]}, ${shown(scores[i])}`), hoverinfo: "text",
      showlegend: false, marker: { color: ring.map(tint), size: ring.map((i) => (i === state.client ? 18 : many ? 6 : 12)),
        line: { width: ring.map((i) => (i === state.client ? 3 : 0)), color: page.pick() }, opacity: 1 } };
    const models = square() ? [] : [{ type: "scatter", mode: "markers+text", showlegend: false, hoverinfo: "text",
      x: range(numColumns).map((j) => inner(j)[0]), y: range(numColumns).map((j) => inner(j)[1]),
      text: range(numColumns).map((j) => `model ${j}`), textposition: "top center", marker: { symbol: "square", size: 13, color: ink } }];
    const hidden = { visible: false, range: [-1.25, 1.25] };
    return {
      data: [...classes.map((list) => line(list, { opacity: list.level * fade, line: { color: ink, width: 0.6 + 1.6 * list.level } })),
        line(own, { opacity: 1, line: { color: page.pick(), width: 3 } }), ...models, nodes],
      layout: { margin: { l: 4, r: 4, t: 4, b: 4 }, xaxis: { ...hidden }, yaxis: { ...hidden, scaleanchor: "x" } },
      click: (point) => { if (point.customdata !== undefined) select(point.customdata); },
    };
  }

  function tellRound() {
    const round = sharing.rounds[state.at];
    byId("round-shown").textContent = `round ${round}`;
    byId("round").setAttribute("aria-valuetext", `round ${round}`);
    if (state.kind !== "sharing" || groups.length < 2) { byId("cosines").textContent = ""; return; }
    const all = values(), sum = [0, 0], count = [0, 0];
    for (let i = 0; i < n; i++) for (let j = 0; j < i; j++) {
      const across = d.group[i] === d.group[j] ? 0 : 1;
      sum[across] += all[i][j]; count[across]++;
    }
    const mean = (which) => (sum[which] / count[which]).toFixed(2);
    const within = count[0] ? `${mean(0)} within true groups, ` : ""; // where a group has two clients
    byId("cosines").textContent = `Round ${round}: mean cosine ${within}${mean(1)} between different groups.`;
  }

  function moveTo(at) {
    state.at = at;
    byId("round").value = at;
    tellRound();
    ["matrix", "graph"].forEach(draw);
    tellClient();
  }

  function startSharing() {
    const slider = byId("round"), play = byId("play");
    slider.max = sharing.rounds.length - 1;
    slider.addEventListener("input", () => moveTo(Number(slider.value)));
    let timer = 0;
    const stop = () => { clearInterval(timer); timer = 0; play.textContent = "Play"; };
    play.addEventListener("click", () => {
      if (timer) { stop(); return; }
      play.textContent = "Stop";
      if (state.at === sharing.rounds.length - 1) moveTo(0);
      timer = setInterval(() => { if (state.at + 1 < sharing.rounds.length) moveTo(state.at + 1); else stop(); }, 700);
    });
    for (const [id, key] of [["kind", "kind"], ["order", "by"]]) {
      state[key] = byId(id).value;
      byId(id).addEventListener("change", () => { state[key] = byId(id).value; moveTo(state.at); draw("neighbors"); });
    }
    plot("matrix", matrix);
    plot("graph", graph);
    moveTo(state.at);
  }

  // --- A client ----------------------------------------------------------------------------------------------------

  function curves() {
    const i = state.client, line = (y, name, settings) => ({ type: "scatter", mode: "lines+markers", x: d.rounds, y, name, ...settings });
    const data = [line(d.test[i], `client ${ids[i]}, test`, { line: { color: page.pick(), width: 3 } })];
    if (d.train) data.push(line(d.train[i], "its training examples", { line: { color: page.pick(), dash: "dot" } }));
    const middle = d.spread.levels.indexOf(50);
    data.push({ type: "scatter", mode: "lines", x: d.spread.rounds, y: d.spread.values[middle], name: "median client",
      line: { color: page.isDark() ? "#56B4E9" : "#0072B2", dash: "dash" } });
    return { data, layout: { xaxis: { title: { text: "round" } }, yaxis: scoreAxis } };
  }

  function labels() {
    const own = d.labels[state.client], classes = range(own.length).map(String);
    const share = (counts) => { const total = counts.reduce((a, b) => a + b, 0) || 1; return counts.map((c) => c / total); };
    const all = classes.map((_, c) => d.labels.reduce((sum, row) => sum + row[c], 0));
    return {
      data: [{ type: "bar", x: classes, y: share(own), name: `client ${ids[state.client]}`, marker: { color: page.pick() },
        customdata: own, hovertemplate: "class %{x}: %{customdata} examples<extra></extra>" },
      { type: "bar", x: classes, y: share(all), name: "all clients", marker: { color: "#56B4E9" } }],
      layout: { xaxis: { title: { text: "class" }, type: "category" },
        yaxis: { title: { text: "share of training examples" }, tickformat: ".0%" } },
    };
  }

  function rowAt(at, i) { // the client's row of the matrix at a round, without all the others
    if (state.kind !== "sharing") return weights(at)[i];
    const own = new Map(), flat = sharing.used[at], row = new Float32Array(n);
    for (let a = 0; a < flat[i].length; a += 2) own.set(flat[i][a], flat[i][a + 1]);
    flat.forEach((other, j) => {
      let dot = 0, square = 0;
      for (let a = 0; a < other.length; a += 2) { dot += (own.get(other[a]) || 0) * other[a + 1]; square += other[a + 1] ** 2; }
      row[j] = dot / (Math.sqrt(square) || 1);
    });
    const length = Math.sqrt([...own.values()].reduce((sum, w) => sum + w * w, 0)) || 1;
    return row.map((value) => value / length);
  }

  function neighbors() {
    const i = state.client, rows = range(sharing.rounds.length).map((at) => rowAt(at, i));
    const most = Float32Array.from(range(rows[0].length), (j) => rows.reduce((sum, row) => sum + row[j], 0));
    const chosen = [...new Set([...strongest(i, last(rows), 4), ...strongest(i, most, 6)])].slice(0, 6);
    const data = chosen.map((j, k) => ({ type: "scatter", mode: "lines+markers", x: sharing.rounds, y: rows.map((row) => row[j]),
      name: square() ? `${named(j)} (group ${d.group[j]})` : named(j), marker: { symbol: page.SYMBOLS[k], size: 8 },
      line: { color: square() ? tint(j) : color(j, numColumns) } }));
    return { data, layout: { xaxis: { title: { text: "round" } }, showlegend: true,
      yaxis: { title: { text: state.kind === "sharing" ? "cosine of weights" : "weight" }, rangemode: "tozero" } } };
  }

  function tellClient() {
    const i = state.client, row = d.rows && d.rows[i], parts = [`Client ${ids[i]}`, `group ${d.group[i]}`];
    if (sharing) parts.push(`found group ${sharing.found[i]}`);
    if (row) parts.push(`${row.n_train} training and ${row.n_test} test examples`);
    parts.push(`${word} ${shown(scores[i])} in the last round`);
    let text = `${parts.join(", ")}. `;
    if (sharing) {
      const own = rowAt(state.at, i);
      const near = strongest(i, own, 3).map((j) => `${named(j)} (${own[j].toFixed(2)})`);
      const lead = state.kind === "sharing" ? "Shares models most with" : "Uses most";
      const none = state.kind === "sharing" ? "Shares models with nobody" : "Uses nobody else's model";
      text += `${near.length ? `${lead} ${near.join(", ")}` : none} in round ${sharing.rounds[state.at]}.`;
    }
    byId("client-told").textContent = text;
  }

  function select(i) {
    if (i === undefined || Number.isNaN(i)) return;
    state.client = i;
    byId("client").value = String(i);
    document.querySelectorAll("tr.picked").forEach((row) => row.classList.remove("picked"));
    const button = document.querySelector(`#clients-table button[data-client="${ids[i]}"]`);
    if (button) button.closest("tr").classList.add("picked");
    tellClient();
    ["curves", "labels", "neighbors", "matrix", "graph", "ranking"].forEach(draw);
  }

  function startClient() {
    const list = byId("client");
    ids.forEach((id, i) => list.append(new Option(`${id}`, i)));
    list.addEventListener("change", () => select(Number(list.value)));
    byId("previous").addEventListener("click", () => select((state.client + n - 1) % n));
    byId("next").addEventListener("click", () => select((state.client + 1) % n));
    const table = byId("clients-table");
    if (table) table.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-client]");
      if (!button) return;
      select(place.get(Number(button.dataset.client)));
      byId("client-told").scrollIntoView({ block: "center" });
    });
    plot("curves", curves);
    if (d.labels) plot("labels", labels);
    if (sharing) plot("neighbors", neighbors);
    select(sorted.accuracy[0]); // the worst, or of a loss the one with the largest
  }

  // --- All clients -------------------------------------------------------------------------------------------------

  function ranking() {
    const ranked = sorted.accuracy.filter((i) => scores[i] !== null), rank = new Map(ranked.map((i, k) => [i, k + 1]));
    const data = groups.map((group, g) => {
      const members = ranked.filter((i) => d.group[i] === group);
      return { type: "scatter", mode: "markers", name: `group ${group}`, x: members.map((i) => rank.get(i)), showlegend: groups.length > 1 && groups.length <= 8,
        y: members.map((i) => scores[i]), customdata: members, hovertext: members.map((i) => `client ${ids[i]}: ${shown(scores[i])}`),
        hoverinfo: "text", marker: { color: color(g, groups.length), symbol: page.SYMBOLS[g % 8], size: members.map((i) => (i === state.client ? 16 : n > 150 ? 6 : 10)),
          opacity: 1, line: { color: page.pick(), width: members.map((i) => (i === state.client ? 3 : 0)) } } };
    });
    return { data, layout: { xaxis: { title: { text: "client, worst first" } }, yaxis: scoreAxis },
      click: (point) => select(point.customdata) };
  }

  function spread() {
    const { levels, values: rows, rounds, mean } = d.spread, row = (level) => rows[levels.indexOf(level)];
    const band = (low, high, opacity, name) => [
      { type: "scatter", mode: "lines", x: rounds, y: row(low), line: { width: 0 }, hoverinfo: "skip", showlegend: false },
      { type: "scatter", mode: "lines", x: rounds, y: row(high), line: { width: 0 }, fill: "tonexty", name, hoverinfo: "skip",
        fillcolor: `rgba(86,180,233,${opacity})` }];
    const line = (y, name, settings) => ({ type: "scatter", mode: "lines+markers", x: rounds, y, name, line: settings });
    const data = [...band(0, 100, 0.16, "all clients"), ...band(10, 90, 0.25, "10 to 90 %"), ...band(25, 75, 0.4, "25 to 75 %"),
      line(row(percent ? 10 : 90), "worst tenth begins", { color: "#D55E00", dash: "dash" }),
      line(mean || row(50), mean ? "mean, by examples" : "median", { color: page.isDark() ? "#9fd8ff" : "#0072B2", width: 3 })];
    return { data, layout: { xaxis: { title: { text: "round" } }, yaxis: scoreAxis } };
  }

  function traffic() {
    const unit = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]].find(([size]) => last(d.bytes) >= size);
    const x = d.bytes.map((value) => value / unit[0]), middle = d.spread.values[d.spread.levels.indexOf(50)];
    const tail = d.spread.values[d.spread.levels.indexOf(percent ? 10 : 90)];
    const line = (y, name, color, dash) => ({ type: "scatter", mode: "lines+markers", x, y, name, line: { color, dash } });
    return { data: [line(d.spread.mean || middle, "mean", page.isDark() ? "#56B4E9" : "#0072B2"), line(tail, "worst tenth begins", "#D55E00", "dash")],
      layout: { xaxis: { title: { text: `${unit[1]} received and sent by a client` } }, yaxis: scoreAxis } };
  }

  const measure = (name) => () => ({ data: [{ type: "scatter", mode: "lines+markers", x: d.spread.rounds, y: d.measured[name],
    line: { color: page.isDark() ? "#56B4E9" : "#0072B2" } }],
    layout: { xaxis: { title: { text: "round" } }, yaxis: { title: { text: name.replace(/_/g, " ") } } } });

  function startDownloads() {
    const names = [...new Set(d.history.flatMap((row) => Object.keys(row)))];
    byId("csv-rounds").addEventListener("click", () => page.download("rounds.csv",
      [names, ...d.history.map((row) => names.map((name) => row[name]))]));
    byId("csv-scores").addEventListener("click", () => page.download("scores.csv", [["client", "round", d.score],
      ...ids.flatMap((id, i) => d.rounds.map((round, t) => [id, round, d.test[i][t]]))]));
    byId("csv-clients").addEventListener("click", () => {
      const keys = d.rows ? Object.keys(d.rows[0]) : [];
      page.download("clients.csv", [["client", "group", "found_group", ...keys.filter((key) => key !== "client")],
        ...ids.map((id, i) => [id, d.group[i], sharing ? sharing.found[i] : "",
          ...keys.filter((key) => key !== "client").map((key) => d.rows[i][key])])]);
    });
  }

  if (sharing) startSharing();
  plot("ranking", ranking);
  startClient();
  plot("spread", spread);
  if (d.bytes && d.bytes.length === d.spread.rounds.length) plot("traffic", traffic);
  Object.keys(d.measured).forEach((name, k) => plot(`measure-${k}`, measure(name)));
  startDownloads();
});
