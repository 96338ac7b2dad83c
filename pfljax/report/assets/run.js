// The page of a run: one client, all clients, scores, traffic. sharing.js shows who shares models.
"use strict";

page.start((d) => {
  const { byId, color, draw, plot } = page;
  const n = d.clients.length,
    ids = d.clients,
    sharing = d.sharing,
    percent = d.score === "accuracy";
  const range = (num) => Array.from({ length: num }, (_, i) => i);
  const shown = (value) =>
    value === null || value === undefined || Number.isNaN(value)
      ? "not scored"
      : percent
        ? `${(100 * value).toFixed(1)} %`
        : value.toPrecision(4);
  const last = (series) => series[series.length - 1];
  const scores = d.test.map(last);
  const word = percent ? "test accuracy" : "test loss";
  const scoreAxis = { title: { text: word }, ...(percent ? { tickformat: ".0%" } : {}) };
  const groups = [...new Set(d.group)].sort((a, b) => a - b);
  const tint = (i) => color(groups.indexOf(d.group[i]), groups.length);
  const groupOf = (i) => (groups.length > 1 ? `group ${d.group[i]}` : ""); // empty if there is one, or none is known
  const state = { at: sharing ? sharing.rounds.length - 1 : 0, kind: "sharing", by: "group", client: 0 };
  const place = new Map(ids.map((id, i) => [id, i]));

  const rank = scores.map((score) => (score === null ? Infinity : percent ? score : -score)); // unscored clients last
  const sorted = {
    group: range(n).sort((a, b) => d.group[a] - d.group[b] || a - b),
    found: sharing ? sharing.order : range(n),
    accuracy: range(n).sort((a, b) => (rank[a] === rank[b] ? a - b : rank[a] - rank[b])),
  };
  const common = { n, ids, place, range, last, state, groups, groupOf, tint, shown, scores, sorted, select, tellClient };
  const links = sharing ? makeSharing(d, common) : null;

  // --- A client ----------------------------------------------------------------------------------------------------

  function curves() {
    const i = state.client,
      line = (y, name, settings) => ({ type: "scatter", mode: "lines+markers", x: d.rounds, y, name, ...settings });
    const data = [line(d.test[i], `client ${ids[i]}, test`, { line: { color: page.pick(), width: 3 } })];
    if (d.train) data.push(line(d.train[i], "training examples", { line: { color: page.pick(), dash: "dot" } }));
    const middle = d.spread.levels.indexOf(50);
    data.push({
      type: "scatter",
      mode: "lines",
      x: d.spread.rounds,
      y: d.spread.values[middle],
      name: "median client",
      line: { color: page.isDark() ? "#56B4E9" : "#0072B2", dash: "dash" },
    });
    return { data, layout: { xaxis: { title: { text: "round" } }, yaxis: scoreAxis } };
  }

  function labels() {
    const own = d.labels[state.client],
      classes = range(own.length).map(String);
    const share = (counts) => {
      const total = counts.reduce((a, b) => a + b, 0) || 1;
      return counts.map((c) => c / total);
    };
    const all = classes.map((_, c) => d.labels.reduce((sum, row) => sum + row[c], 0));
    return {
      data: [
        {
          type: "bar",
          x: classes,
          y: share(own),
          name: `client ${ids[state.client]}`,
          marker: { color: page.pick() },
          customdata: own,
          hovertemplate: "class %{x}: %{customdata} examples<extra></extra>",
        },
        { type: "bar", x: classes, y: share(all), name: "all clients", marker: { color: "#56B4E9" } },
      ],
      layout: {
        xaxis: { title: { text: "class" }, type: "category" },
        yaxis: { title: { text: "share of training examples" }, tickformat: ".0%" },
      },
    };
  }

  // The client's number, and its name in the data set if that differs.
  const named = (i) => (d.rows && d.rows[i].name !== undefined ? `${ids[i]} (${d.rows[i].name})` : `${ids[i]}`);

  function tellClient() {
    const i = state.client,
      row = d.rows && d.rows[i],
      parts = [`Client ${named(i)}`, groupOf(i)].filter(Boolean);
    if (sharing) parts.push(`found group ${sharing.found[i]}`);
    if (row) parts.push(`${row.n_train} training and ${row.n_test} test examples`);
    parts.push(`${word} ${shown(scores[i])} in the last round`);
    let text = `${parts.join(", ")}. `;
    if (sharing) {
      const own = links.rowAt(state.at, i);
      const near = links.strongest(i, own, 3).map((j) => `${links.named(j)} (${own[j].toFixed(2)})`);
      const lead = state.kind === "sharing" ? "Shares models most with" : "Uses most";
      const none = state.kind === "sharing" ? "Shares models with no one" : "Uses nobody else's model";
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
    ids.forEach((_, i) => list.append(new Option(named(i), i)));
    list.addEventListener("change", () => select(Number(list.value)));
    byId("previous").addEventListener("click", () => select((state.client + n - 1) % n));
    byId("next").addEventListener("click", () => select((state.client + 1) % n));
    const table = byId("clients-table");
    if (table)
      table.addEventListener("click", (event) => {
        const button = event.target.closest("button[data-client]");
        if (!button) return;
        select(place.get(Number(button.dataset.client)));
        byId("client-told").scrollIntoView({ block: "center" });
      });
    plot("curves", curves);
    if (d.labels) plot("labels", labels);
    if (sharing) plot("neighbors", links.neighbors);
    select(sorted.accuracy[0]); // the worst client: lowest accuracy or largest loss
  }

  // --- All clients -------------------------------------------------------------------------------------------------

  function ranking() {
    const ranked = sorted.accuracy.filter((i) => scores[i] !== null),
      position = new Map(ranked.map((i, k) => [i, k + 1]));
    const data = groups.map((group, g) => {
      const members = ranked.filter((i) => d.group[i] === group);
      return {
        type: "scatter",
        mode: "markers",
        name: `group ${group}`,
        x: members.map((i) => position.get(i)),
        showlegend: groups.length > 1 && groups.length <= 8,
        y: members.map((i) => scores[i]),
        customdata: members,
        hovertext: members.map((i) => `client ${ids[i]}: ${shown(scores[i])}`),
        hoverinfo: "text",
        marker: {
          color: color(g, groups.length),
          symbol: page.SYMBOLS[g % 8],
          size: members.map((i) => (i === state.client ? 16 : n > 150 ? 6 : 10)),
          opacity: 1,
          line: { color: page.pick(), width: members.map((i) => (i === state.client ? 3 : 0)) },
        },
      };
    });
    return {
      data,
      layout: { xaxis: { title: { text: "client, worst first" } }, yaxis: scoreAxis },
      click: (point) => select(point.customdata),
    };
  }

  function spread() {
    const { levels, values: rows, rounds, mean } = d.spread,
      row = (level) => rows[levels.indexOf(level)];
    const band = (low, high, opacity, name) => [
      {
        type: "scatter",
        mode: "lines",
        x: rounds,
        y: row(low),
        line: { width: 0 },
        hoverinfo: "skip",
        showlegend: false,
      },
      {
        type: "scatter",
        mode: "lines",
        x: rounds,
        y: row(high),
        line: { width: 0 },
        fill: "tonexty",
        name,
        hoverinfo: "skip",
        fillcolor: `rgba(86,180,233,${opacity})`,
      },
    ];
    const line = (y, name, settings) => ({
      type: "scatter",
      mode: "lines+markers",
      x: rounds,
      y,
      name,
      line: settings,
    });
    const data = [
      ...band(0, 100, 0.16, "all clients"),
      ...band(10, 90, 0.25, "10 to 90 %"),
      ...band(25, 75, 0.4, "25 to 75 %"),
      line(row(percent ? 10 : 90), "edge of the worst tenth", { color: "#D55E00", dash: "dash" }),
      line(mean || row(50), mean ? "mean, weighted by examples" : "median", {
        color: page.isDark() ? "#9fd8ff" : "#0072B2",
        width: 3,
      }),
    ];
    return { data, layout: { xaxis: { title: { text: "round" } }, yaxis: scoreAxis } };
  }

  function traffic() {
    const unit = [
      [2 ** 30, "GiB"],
      [2 ** 20, "MiB"],
      [2 ** 10, "KiB"],
      [1, "B"],
    ].find(([size]) => last(d.bytes) >= size);
    const x = d.bytes.map((value) => value / unit[0]),
      middle = d.spread.values[d.spread.levels.indexOf(50)];
    const tail = d.spread.values[d.spread.levels.indexOf(percent ? 10 : 90)];
    const line = (y, name, color, dash) => ({
      type: "scatter",
      mode: "lines+markers",
      x,
      y,
      name,
      line: { color, dash },
    });
    return {
      data: [
        line(d.spread.mean || middle, "mean", page.isDark() ? "#56B4E9" : "#0072B2"),
        line(tail, "edge of the worst tenth", "#D55E00", "dash"),
      ],
      layout: { xaxis: { title: { text: `${unit[1]} received and sent per client` } }, yaxis: scoreAxis },
    };
  }

  const measure = (name) => () => ({
    data: [
      {
        type: "scatter",
        mode: "lines+markers",
        x: d.spread.rounds,
        y: d.measured[name],
        line: { color: page.isDark() ? "#56B4E9" : "#0072B2" },
      },
    ],
    layout: { xaxis: { title: { text: "round" } }, yaxis: { title: { text: name.replace(/_/g, " ") } } },
  });

  function startDownloads() {
    const names = [...new Set(d.history.flatMap((row) => Object.keys(row)))];
    byId("csv-rounds").addEventListener("click", () =>
      page.download("rounds.csv", [names, ...d.history.map((row) => names.map((name) => row[name]))]),
    );
    byId("csv-scores").addEventListener("click", () =>
      page.download("scores.csv", [
        ["client", "round", d.score],
        ...ids.flatMap((id, i) => d.rounds.map((round, t) => [id, round, d.test[i][t]])),
      ]),
    );
    byId("csv-clients").addEventListener("click", () => {
      const keys = d.rows ? Object.keys(d.rows[0]) : [];
      page.download("clients.csv", [
        ["client", "group", "found_group", ...keys.filter((key) => key !== "client")],
        ...ids.map((id, i) => [
          id,
          groups.length > 1 ? d.group[i] : "",
          sharing ? sharing.found[i] : "",
          ...keys.filter((key) => key !== "client").map((key) => d.rows[i][key]),
        ]),
      ]);
    });
  }

  if (sharing) links.start();
  plot("ranking", ranking);
  startClient();
  plot("spread", spread);
  if (d.bytes && d.bytes.length === d.spread.rounds.length) plot("traffic", traffic);
  Object.keys(d.measured).forEach((name, k) => plot(`measure-${k}`, measure(name)));
  startDownloads();
});
