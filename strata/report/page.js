"use strict";
// Draws the report from the JSON in #data. Text from runs only ever goes into textContent, or through plain() into
// Plotly, which reads a little HTML in its labels.
(() => {
  let data = JSON.parse(document.getElementById("data").textContent);
  const main = document.getElementById("main"), root = document.documentElement;
  const state = { x: "rounds", y: "accuracy", best: false, seeds: false, memory: null, round: null, details: false, playing: false, timer: null };
  const hidden = new Set();
  const charts = [];

  // --- small things ---------------------------------------------------------------------------------------------
  const el = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "text") node.textContent = value;
      else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "colour") node.style.setProperty("--colour", value);
      else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child != null));
    return node;
  };
  const plain = (text) => String(text).replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
  // labels mostly begin alike and differ towards the end: the middle goes, and a little more of the end stays
  const short = (text, most) => { const front = Math.floor(0.4 * (most - 1)); return text.length > most ? text.slice(0, front) + "…" + text.slice(front + 1 - most) : text; };
  const colour = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const percent = (value, digits = 1) => (value == null ? "–" : (100 * value).toFixed(digits));
  const scaled = (value, base, units) => {
    let at = 0;
    while (Math.abs(value) >= base && at < units.length - 1) { value /= base; at++; }
    return [value, units[at], base ** at];
  };
  const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"], FLOPS = ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"];
  const digits = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2));
  const unit = (value, base, units) => { if (value == null) return "–"; const [v, u] = scaled(value, base, units); return (u === "B" ? v : digits(v)) + " " + u; };
  const bytes = (value) => unit(value, 1024, BYTES), flops = (value) => unit(value, 1000, FLOPS);
  const duration = (s) => (s == null ? "–" : s < 120 ? digits(s) + " s" : s < 7200 ? (s / 60).toFixed(1) + " min" : (s / 3600).toFixed(1) + " h");
  const tint = (hex, alpha) => { const n = parseInt(hex.slice(1), 16); return `rgba(${n >> 16},${(n >> 8) & 255},${n & 255},${alpha})`; };
  const phone = () => window.innerWidth < 560;
  const visible = () => data.groups.filter((group) => !hidden.has(group.label));

  const section = (title, says, ...children) => el("section", {}, el("h2", { text: title }), says && el("p", { class: "says", text: says }), ...children);
  const choices = (options, chosen, pick) => {
    const box = el("div", { class: "switch", role: "group" });
    for (const [value, text] of options) {
      box.append(el("button", { type: "button", text: short(text, 30), title: text, "aria-pressed": String(value === chosen), onclick: (event) => {
        for (const other of box.children) other.setAttribute("aria-pressed", String(other === event.target));
        pick(value);
      } }));
    }
    return box;
  };
  const tick = (text, key, redraw) => el("label", { class: "tick" }, el("input", { type: "checkbox", checked: state[key], onchange: (event) => { state[key] = event.target.checked; redraw(); } }), text);

  // --- charts ---------------------------------------------------------------------------------------------------
  const axis = (title, more = {}) => ({
    title: { text: title, font: { size: 12, color: colour("soft") }, standoff: 10 }, gridcolor: colour("faint"), zeroline: false,
    linecolor: colour("line"), tickcolor: colour("line"), tickfont: { size: 11.5, color: colour("soft") }, automargin: true, fixedrange: phone(), ...more,
  });
  const layout = (height, more) => ({
    height: phone() ? Math.min(height, 310) : height, margin: { l: 8, r: 12, t: 14, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, color: colour("ink"), size: 12.5 }, showlegend: false, hovermode: "closest", modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("soft"), activecolor: colour("accent") },
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink"), size: 12.5 }, align: "left" }, ...more,
  });
  const CONFIG = {
    responsive: true, displaylogo: false, displayModeBar: "hover", toImageButtonOptions: { format: "svg", filename: "strata" },
    modeBarButtonsToRemove: ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
  };
  // texts at 0, 1, 2, ... of an axis: numbers, not texts, tell bars and cells apart, as short texts may be the same
  const named = (texts, longest, most = texts.length) => {
    const every = Math.ceil(texts.length / most), at = texts.map((_, i) => i).filter((i) => i % every === 0);
    return { tickmode: "array", tickvals: at, ticktext: at.map((i) => plain(short(texts[i], longest))), range: [-0.5, texts.length - 0.5], showgrid: false, autotickangles: [0, -40, -90], ticklabeloverflow: "allow" };
  };
  const legend = (more = {}) => ({ showlegend: true, legend: { orientation: "h", y: -0.22, x: 0, font: { size: 11.5, color: colour("soft") }, ...more } });
  // a chart is a place and a function that says what to draw; it is drawn again when data or theme change
  const chart = (make, name) => {
    const place = el("div", { class: "chart", "data-chart": name, role: "img", "aria-label": name });
    const draw = () => { const [traces, form] = make(); return Plotly.react(place, traces, form, CONFIG); };
    charts.push(draw);
    return { place, draw };
  };

  const AXES = {
    rounds: { key: "rounds", name: "round", scale: () => [1, ""] },
    upload: { key: "upload_bytes", name: "uploaded by all devices", scale: (most) => { const [, u, by] = scaled(most, 1024, BYTES); return [by, u]; } },
    flops: { key: "train_flops", name: "training operations of all devices", scale: (most) => { const [, u, by] = scaled(most, 1000, FLOPS); return [by, u]; } },
    seconds: { key: "seconds", name: "time of the run", scale: (most) => (most > 7200 ? [3600, "h"] : most > 300 ? [60, "min"] : [1, "s"]) },
  };
  const running = (values) => { let top = -Infinity; return values.map((value) => (value == null ? null : (top = Math.max(top, value)))); };
  const summed = (values) => { let sum = 0; return values.map((value) => (sum += value || 0)); };

  // of a method that is there several times: its shade, and these
  const DASHES = ["solid", "dash", "dot", "dashdot"], SYMBOLS = ["circle", "square", "diamond", "triangle-up", "x"];

  // The lines of a run or of a group's mean, in the chosen axes: {x, y, std}
  function line(source, group) {
    const kind = AXES[state.x];
    if (source === group && state.y === "accuracy") {
      const curve = group.curve, y = state.best ? running(curve.mean) : curve.mean;
      return { x: curve[kind.key], y, std: state.best ? [] : curve.std };
    }
    if (source === group) { // loss: rounds that all seeds have
      const runs = group.runs, rounds = Math.min(...runs.map((run) => run.round.length));
      const at = (key, i, sum) => runs.map((run) => (sum ? sum.get(run)[i] : run[key][i]));
      const sums = new Map(runs.map((run) => [run, kind.key === "rounds" ? run.round : summed(run[kind.key])]));
      const x = [], y = [], std = [];
      for (let i = 0; i < rounds; i++) {
        const values = at("train_loss", i);
        if (values.some((value) => value == null)) { x.push(null); y.push(null); std.push(null); continue; }
        const mean = values.reduce((a, b) => a + b, 0) / values.length;
        x.push(at(null, i, sums).reduce((a, b) => a + b, 0) / runs.length);
        y.push(mean);
        std.push(values.length > 1 ? Math.sqrt(values.reduce((a, b) => a + (b - mean) ** 2, 0) / (values.length - 1)) : null);
      }
      return { x, y, std };
    }
    const xs = kind.key === "rounds" ? source.round : summed(source[kind.key]);
    let ys = state.y === "accuracy" ? source.accuracy : source.train_loss;
    const keep = ys.map((value, i) => i).filter((i) => ys[i] != null);
    ys = keep.map((i) => ys[i]);
    return { x: keep.map((i) => xs[i]), y: state.best && state.y === "accuracy" ? running(ys) : ys, std: [] };
  }

  function accuracyChart() {
    const kind = AXES[state.x], isAccuracy = state.y === "accuracy", factor = isAccuracy ? 100 : 1;
    const lines = visible().map((group) => [group, line(group, group)]);
    const most = Math.max(1e-9, ...lines.flatMap(([, l]) => l.x.filter((x) => x != null)));
    const [by, name] = kind.scale(most);
    const traces = [];
    for (const [group, { x, y, std }] of lines) {
      const xs = x.map((value) => (value == null ? null : value / by)), ys = y.map((value) => (value == null ? null : value * factor));
      const band = std.some((value) => value != null && value > 0);
      if (band) {
        const at = xs.map((_, i) => i).filter((i) => ys[i] != null && std[i] != null);
        traces.push({
          type: "scatter", mode: "lines", line: { width: 0 }, fill: "toself", fillcolor: tint(group.colour, 0.16), hoverinfo: "skip",
          x: [...at.map((i) => xs[i]), ...at.map((i) => xs[i]).reverse()],
          y: [...at.map((i) => ys[i] + factor * std[i]), ...at.map((i) => ys[i] - factor * std[i]).reverse()],
        });
      }
      if (state.seeds && group.runs.length > 1) {
        for (const run of group.runs) {
          const own = line(run, group);
          traces.push({
            type: "scatter", mode: "lines", x: own.x.map((value) => value / by), y: own.y.map((value) => value * factor),
            line: { width: 1, color: tint(group.colour, 0.55), dash: "dot" }, hovertemplate: `${plain(short(run.name, 40))}: %{y:.2f}<extra></extra>`,
          });
        }
      }
      traces.push({
        type: "scatter", mode: y.length > 60 ? "lines" : "lines+markers", x: xs, y: ys, name: plain(group.label), customdata: std.map((s) => (s == null ? "" : " ± " + (factor * s).toFixed(isAccuracy ? 1 : 3))),
        line: { width: 2.6, color: group.colour, dash: DASHES[group.nth % DASHES.length] }, marker: { size: 5, color: group.colour, symbol: SYMBOLS[group.nth % SYMBOLS.length] },
        hovertemplate: `<b>${plain(short(group.label, 40))}</b><br>%{y:.${isAccuracy ? 1 : 3}f}%{customdata}${isAccuracy ? " %" : ""} at %{x:.4~g}${name ? " " + name : ""}<extra></extra>`,
      });
    }
    const y = isAccuracy ? axis("test accuracy, %", { rangemode: "tozero" }) : axis("training loss");
    return [traces, layout(400, { xaxis: axis(kind.name + (name ? ", " + name : ""), { rangemode: "tozero" }), yaxis: y })];
  }

  // where each point's text stands so that no two lie on each other, nor on a point: the first place that is free
  const PLACES = [["middle right", 0, -0.5], ["middle left", -1, -0.5], ["top right", 0, -1.25], ["bottom right", 0, 0.25], ["top left", -1, -1.25], ["bottom left", -1, 0.25], ["top center", -0.5, -1.6], ["bottom center", -0.5, 0.6]];
  function places(points, texts, width) {
    const high = 15, taken = points.map(([x, y]) => [x - 8, y - 8, x + 8, y + 8]);
    return points.map(([x, y], i) => {
      const wide = 6.6 * texts[i].length, box = ([, dx, dy]) => { const left = x + dx * wide + (dx === 0 ? 10 : dx === -1 ? -10 : 0), top = y + dy * high; return [left, top, left + wide, top + high]; };
      const meets = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
      const free = PLACES.find((place) => { const own = box(place); return own[0] >= 0 && own[2] <= width && taken.every((other, j) => j === i || !meets(own, other)); });
      if (free) taken.push(box(free));
      return free && free[0]; // none: the colours above and the cursor say it
    });
  }
  function costChart(key, title) {
    const groups = visible().filter((group) => group.accuracy != null && group[key]);
    const [, name, by] = scaled(Math.max(1, ...groups.map((group) => group[key])), 1024, BYTES);
    const accuracies = groups.map((group) => 100 * group.accuracy), low = Math.min(...accuracies), high = Math.max(...accuracies), room = Math.max(2, 0.25 * (high - low));
    const most = Math.max(...groups.map((group) => group[key])) / by, bottom = Math.max(0, low - room), top = Math.min(100, high + room);
    const width = phone() ? 250 : 470, texts = groups.map((group) => short(group.label, phone() ? 14 : 26));
    const stands = places(groups.map((group) => [(width * group[key]) / by / (1.08 * most), (270 * (top - 100 * group.accuracy)) / (top - bottom)]), texts, width);
    const traces = groups.map((group, i) => ({
      type: "scatter", mode: "markers+text", x: [group[key] / by], y: [100 * group.accuracy], text: [stands[i] ? plain(texts[i]) : ""],
      textposition: stands[i] || "middle right", textfont: { size: 12, color: colour("ink") }, cliponaxis: false,
      marker: { size: 13, color: group.colour, symbol: SYMBOLS[group.nth % SYMBOLS.length], line: { width: 1.5, color: colour("card") } },
      error_y: { type: "data", array: [100 * (group.accuracy_std || 0)], visible: group.accuracy_std != null, color: group.colour, thickness: 1.4, width: 4 },
      hovertemplate: `<b>${plain(short(group.label, 60))}</b><br>%{y:.1f} % at %{x:.4~g} ${name}<extra></extra>`,
    }));
    return [traces, layout(340, { xaxis: axis(`${title}, ${name}`, { range: [0, 1.08 * most] }), yaxis: axis("test accuracy, %", { range: [bottom, top] }) })];
  }

  function stepsChart() {
    const traces = visible().filter((group) => group.memory.steps.length > 1).map((group) => {
      const run = group.runs[0];
      return {
        type: "scatter", mode: "lines", line: { shape: "hv", width: 2.4, color: group.colour }, x: run.round, y: run.step, name: plain(group.label),
        hovertemplate: `<b>${plain(short(group.label, 40))}</b><br>round %{x}: step %{y}<extra></extra>`,
      };
    });
    return [traces, layout(410, { xaxis: axis("round", { rangemode: "tozero" }), yaxis: axis("step", { rangemode: "tozero" }) })];
  }

  // colours say the method: what it is made of is told by strength
  const PARTS = [["weights_bytes", "weights", 0.95], ["gradients_bytes", "gradients", 0.6], ["activations_bytes", "activations", 0.3]];
  function memoryChart() {
    const all = state.memory === null, group = data.groups.find((one) => one.label === state.memory);
    const groups = all ? visible() : [group];
    const most = Math.max(1, ...groups.flatMap((one) => [...one.memory.budgets, ...one.memory.steps.flatMap((s) => [s.memory_bytes || 0, s.measured || 0])]));
    const [, name, by] = scaled(most, 1024, BYTES);
    const traces = [], shapes = [], notes = [];
    const measured = { type: "scatter", mode: "markers", name: "measured, largest device", marker: { symbol: "diamond", size: 10, color: colour("ink"), line: { width: 1.5, color: colour("card") } } };
    if (all) {
      // per method its hungriest step
      const top = (one, key) => Math.max(0, ...one.memory.steps.map((step) => step[key] || 0)) / by || null;
      const x = groups.map((_, i) => i), customdata = groups.map((one) => [plain(short(one.label, 60)), plain(one.memory.accounting || "?")]);
      traces.push({ type: "bar", name: "accounted, largest step", x, y: groups.map((one) => top(one, "memory_bytes")), marker: { color: groups.map((one) => tint(one.colour, 0.75)) }, width: 0.5,
        customdata, hovertemplate: `<b>%{customdata[0]}</b><br>%{customdata[1]} accounting: %{y:.4~g} ${name}<extra></extra>` });
      traces.push({ ...measured, x, y: groups.map((one) => top(one, "measured")), customdata, hovertemplate: `<b>%{customdata[0]}</b><br>measured: %{y:.4~g} ${name}<extra></extra>` });
    } else {
      const steps = group.memory.steps, x = steps.map((step) => step.step);
      for (const [key, text, strength] of PARTS) {
        traces.push({ type: "bar", name: `${text} (${plain(group.memory.accounting || "?")} accounting)`, x, y: steps.map((s) => (s[key] == null ? null : s[key] / by)), marker: { color: tint(group.colour, strength) }, hovertemplate: `step %{x}, ${text}: %{y:.4~g} ${name}<extra></extra>` });
      }
      traces.push({ ...measured, x, y: steps.map((s) => (s.measured == null ? null : s.measured / by)), hovertemplate: `step %{x}, measured: %{y:.4~g} ${name}<extra></extra>` });
    }
    for (const size of new Set(groups.flatMap((one) => one.memory.budgets))) {
      shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: size / by, y1: size / by, line: { color: colour("ink"), width: 1.6, dash: "dash" } });
      notes.push({ xref: "paper", x: 1, y: size / by, text: "budget " + bytes(size), showarrow: false, xanchor: "right", yanchor: "bottom", font: { color: colour("ink"), size: 12 } });
    }
    return [traces, layout(360, { barmode: "stack", shapes, annotations: notes, xaxis: axis(all ? "" : "step", all ? named(groups.map((one) => one.label), 22) : { dtick: group.memory.steps.length > 20 ? 5 : group.memory.steps.length > 1 ? 2 : 1 }),
      yaxis: axis(name, { rangemode: "tozero", range: [0, (most / by) * 1.12] }), ...(all ? {} : legend()) })];
  }

  const dark = () => root.dataset.theme === "dark";
  const ramp = () => [[0, colour("empty")], [0.5, dark() ? "#475469" : "#a9b3c2"], [1, dark() ? "#8f9cb2" : "#313c4f"]];
  const bar = (title, more = {}) => ({ thickness: 9, outlinewidth: 0, len: 0.9, tickfont: { size: 11, color: colour("soft") }, title: { text: title, side: "right", font: { size: 11, color: colour("soft") } }, ...more });
  function classChart() {
    const groups = visible().filter((group) => group.per_class.length), names = classNames(groups), few = names.length <= (phone() ? 12 : 24);
    const z = groups.map((group) => group.per_class.map((value) => (value == null ? null : 100 * value)));
    const labels = groups.map((group) => group.label), customdata = labels.map((label) => names.map((name) => [plain(short(label, 60)), plain(name)]));
    const trace = { type: "heatmap", x: names.map((_, c) => c), y: labels.map((_, i) => i), z, zmin: 0, zmax: 100, colorscale: ramp(), xgap: 2, ygap: 2,
      customdata, hovertemplate: "<b>%{customdata[0]}</b>, class %{customdata[1]}: %{z:.1f} %<extra></extra>", showscale: !few, colorbar: bar("%") };
    if (few) Object.assign(trace, { texttemplate: "%{z:.0f}", textfont: { size: phone() ? 11 : 13, ...(dark() ? { color: "#ffffff" } : {}) } });
    return [[trace], layout(90 + 46 * groups.length, { xaxis: axis("class", { ...named(names, 14, phone() ? 12 : 40), tickangle: names.some((n) => n.length > 3) ? -40 : 0 }), yaxis: axis("", { ...named(labels, phone() ? 12 : 26), range: [labels.length - 0.5, -0.5] }) })];
  }
  const classNames = (groups) => {
    const count = Math.max(0, ...groups.map((group) => group.per_class.length));
    const known = data.data.find((one) => one.classes && one.all_classes === count && one.classes.length === count);
    return known ? known.classes : Array.from({ length: count }, (_, i) => String(i));
  };
  function dataChart(one) {
    const z = one.classes.map((_, c) => one.counts.map((row) => row[c]));
    const trace = { type: "heatmap", z, x: one.counts.map((_, d) => d), y: one.classes.map((_, c) => c), customdata: one.classes.map((name) => one.counts.map(() => plain(name))), colorscale: ramp(), xgap: one.counts.length > 60 ? 0.5 : 1.5, ygap: one.classes.length > 40 ? 0 : 1.5,
      hovertemplate: "device %{x} holds %{z} of class %{customdata}<extra></extra>", colorbar: bar("samples") };
    return [[trace], layout(Math.min(560, 130 + 20 * one.classes.length), { xaxis: axis("device", { showgrid: false, nticks: 12 }), yaxis: axis("class", named(one.classes, 14, 24)) })];
  }
  function failureChart() {
    const traces = visible().map((group) => {
      const rounds = Math.max(0, ...group.runs.map((run) => run.round.length));
      const y = Array.from({ length: rounds }, (_, i) => group.runs.reduce((sum, run) => sum + (run.dropped[i] || 0), 0));
      return { type: "bar", name: plain(group.label), x: y.map((_, i) => i + 1), y, marker: { color: group.colour }, hovertemplate: `<b>${plain(short(group.label, 40))}</b><br>round %{x}: %{y} dropped<extra></extra>` };
    });
    return [traces, layout(230, { barmode: "stack", xaxis: axis("round"), yaxis: axis("devices dropped", { rangemode: "tozero" }), bargap: 0.15 })];
  }

  // --- which parameters train when ------------------------------------------------------------------------------
  const longest = () => Math.max(1, ...data.groups.map((group) => group.parts.rounds || 0));
  const frameAt = (parts, round) => { let found = parts.frames[0]; for (const frame of parts.frames) if (frame.round <= round) found = frame; return found; };
  const nets = [];
  function drawNet({ canvas, text, group }) {
    const parts = group.parts, total = longest(), own = parts.rounds, round = Math.min(state.round, own - 1), frame = frameAt(parts, round);
    const drawn = parts.thinned ? frame.round : round; // where not every round is drawn, the words are those of the picture
    const layers = parts.layers, rows = layers.length, ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    const rowHeight = Math.max(3, Math.min(15, Math.floor(300 / rows))), height = Math.max(60, rows * rowHeight) + 22, unitHeight = (height - 22) / rows;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.clearRect(0, 0, width, height);
    const gutter = 26, mapLeft = gutter, mapWidth = Math.round((width - gutter) * 0.56), netLeft = mapLeft + mapWidth + 18, netWidth = width - netLeft;
    const ink = { frozen: colour("frozen"), trained: group.colour, empty: colour("empty"), soft: colour("soft"), card: colour("card"), ink: colour("ink") };
    const gap = unitHeight > 5 ? 1 : 0.4, top = (i) => (rows - 1 - i) * unitHeight; // the first layer lies at the bottom
    const fill = (layer) => (layer.frozen ? ink.frozen : ink.trained);
    // left: layers over rounds or, where all layers are treated alike, the channels of one over rounds
    const watched = parts.watched, area = height - 22;
    parts.frames.forEach((one, index) => {
      const from = one.round, until = index + 1 < parts.frames.length ? parts.frames[index + 1].round : own;
      const left = mapLeft + (mapWidth * from) / total, right = mapLeft + (mapWidth * until) / total;
      if (watched != null) {
        pen.globalAlpha = 1; pen.fillStyle = ink.empty; pen.fillRect(left, 0, right - left, area);
        pen.fillStyle = fill(one.layers[watched]);
        for (const [a, b] of one.layers[watched].kept) pen.fillRect(left, area * (1 - b), Math.max(0.5, right - left - (right - left > 5 ? 0.6 : 0)), Math.max(0.6, area * (b - a) - (area / layers[watched].width > 4 ? 0.5 : 0)));
        return;
      }
      one.layers.forEach((layer, i) => {
        const y = top(i), w = Math.max(0.5, right - left - (right - left > 4 ? 0.6 : 0));
        pen.globalAlpha = 1; pen.fillStyle = ink.empty; pen.fillRect(left, y, w, unitHeight - gap);
        pen.fillStyle = fill(layer);
        pen.globalAlpha = layer.frozen || layer.share > 0.999 ? 1 : 0.22 + 0.78 * Math.sqrt(layer.share);
        pen.fillRect(left, y, w, unitHeight - gap);
      });
    });
    pen.globalAlpha = 1;
    // cursor
    const at = mapLeft + (mapWidth * (Math.min(state.round, own - 1) + 0.5)) / total;
    pen.strokeStyle = ink.ink; pen.lineWidth = 1.5; pen.beginPath(); pen.moveTo(at, -2); pen.lineTo(at, height - 18); pen.stroke();
    pen.fillStyle = ink.ink; pen.beginPath(); pen.moveTo(at - 5, height - 13); pen.lineTo(at + 5, height - 13); pen.lineTo(at, height - 20); pen.fill();
    // right: the network of that round; channels from left to right, as many as the layer has
    const widest = Math.max(...layers.map((layer) => layer.width || 1));
    frame.layers.forEach((layer, i) => {
      const w = netWidth * (layers[i].width ? Math.max(0.12, layers[i].width / widest) : 1), y = top(i);
      pen.fillStyle = ink.empty; pen.fillRect(netLeft, y, w, unitHeight - gap);
      pen.fillStyle = fill(layer);
      for (const [a, b] of layer.kept) pen.fillRect(netLeft + a * w, y, Math.max(0.8, (b - a) * w - (w / (layers[i].width || 1) > 6 ? 0.5 : 0)), unitHeight - gap);
    });
    // words
    pen.fillStyle = ink.soft; pen.font = "11px " + getComputedStyle(document.body).fontFamily; pen.textBaseline = "middle"; pen.textAlign = "right";
    const step = rows > 30 ? 10 : rows > 12 ? 5 : 1;
    if (watched != null) {
      const count = layers[watched].width;
      for (const channel of new Set([1, Math.round(count / 2), count])) pen.fillText(String(channel), gutter - 6, Math.max(6, area * (1 - (channel - 0.5) / count)));
      // a bracket at the layer that is shown
      pen.fillRect(netLeft - 6, top(watched), 3, unitHeight - gap);
    } else for (let i = 0; i < rows - 1; i++) if (i === 0 || (i + 1) % step === 0) pen.fillText(String(i + 1), gutter - 6, top(i) + unitHeight / 2);
    pen.textBaseline = "alphabetic"; pen.textAlign = "left"; pen.fillText("1", mapLeft, height - 3);
    pen.textAlign = "right"; pen.fillText("round " + total, mapLeft + mapWidth, height - 3);
    if (watched != null) { pen.textAlign = "center"; pen.fillText(mapWidth > 230 ? `channels of layer ${watched + 1}` : `layer ${watched + 1}`, mapLeft + mapWidth / 2 - 12, height - 3); }
    pen.textAlign = "left"; pen.fillText(layers.some((layer) => layer.width) ? "channels in round " + (drawn + 1) : "width in round " + (drawn + 1), netLeft, height - 3);
    // and a sentence
    const said = [`Round ${drawn + 1}`];
    const stepNow = group.runs[0].step[drawn];
    if (group.memory.steps.length > 1 && stepNow != null) said[0] += `, step ${stepNow}`;
    if (frame.trained != null && parts.parameters) said.push(`${percent(frame.trained / parts.parameters, frame.trained / parts.parameters < 0.1 ? 1 : 0)} % of ${parts.parameters.toLocaleString("en")} parameters train` + (frame.frozen ? `, ${percent(frame.frozen / parts.parameters, 1)} % are frozen` : ""));
    if (frame.device != null && parts.frames.length > 1 && group.method !== "slt") said.push(`device ${frame.device}`);
    text.textContent = said.join(": ").replace(/: device/, " · device");
    canvas.setAttribute("aria-label", `${group.label}. ${text.textContent}`);
  }
  function partsSection() {
    nets.length = 0;
    if (state.round === null) state.round = longest() - 1;
    state.round = Math.min(state.round, longest() - 1);
    const slider = el("input", { type: "range", min: 1, max: longest(), value: state.round + 1, "aria-label": "round" });
    const output = el("output", { text: `${state.round + 1} of ${longest()}` });
    const show = (round) => { state.round = Math.max(0, Math.min(longest() - 1, round)); slider.value = state.round + 1; output.textContent = `${state.round + 1} of ${longest()}`; nets.forEach(drawNet); };
    slider.addEventListener("input", () => show(slider.value - 1));
    clearInterval(state.timer); // of the page before an update
    const stop = () => { clearInterval(state.timer); state.timer = null; state.playing = false; play.textContent = "▶ Play"; };
    const start = () => {
      state.playing = true;
      play.textContent = "❚❚ Pause";
      const pace = Math.max(1, longest() / 120);
      let now = state.round;
      state.timer = setInterval(() => { if (now >= longest() - 1) return stop(); now += pace; show(Math.round(now)); }, Math.max(60, Math.min(400, 8000 / longest())));
    };
    const play = el("button", { class: "play", type: "button", text: "▶ Play", onclick: () => {
      if (state.playing) return stop();
      if (state.round >= longest() - 1) show(0);
      start();
    } });
    if (state.playing) start();
    const grid = el("div", { class: "nets", style: `--least: ${visible().length === 3 ? 330 : 460}px` });
    for (const group of visible()) {
      const text = el("p"), box = el("div", { class: "net", colour: group.colour }, el("h3", { text: group.label }), text);
      grid.append(box);
      if (group.parts.missing) { text.textContent = group.parts.missing; continue; }
      const canvas = el("canvas", { role: "img", tabindex: 0 });
      const move = (event) => { const box = canvas.getBoundingClientRect(), inside = (event.clientX - box.left - 26) / ((box.width - 26) * 0.56); if (inside >= 0 && inside <= 1) show(Math.floor(inside * longest())); };
      canvas.addEventListener("pointerdown", move);
      canvas.addEventListener("pointermove", (event) => event.buttons && move(event));
      canvas.addEventListener("keydown", (event) => { if (event.key === "ArrowRight") show(state.round + 1); if (event.key === "ArrowLeft") show(state.round - 1); });
      box.append(canvas);
      if (group.parts.note) box.append(el("p", { class: "note", text: group.parts.note }));
      nets.push({ canvas, text, group });
    }
    const key = el("div", { class: "legend" });
    const own = visible().length === 1 ? visible()[0].colour : colour("ink"), where = visible().length === 1 ? "" : ", in the method's colour";
    for (const [fill, says] of [[own, "trains in full" + where], [tint(own, 0.45), "trains in part (the stronger, the wider)"], ["var(--frozen)", "frozen"], ["var(--empty)", "not on the device"]]) {
      const swatch = el("i"); swatch.style.background = fill; key.append(el("span", {}, swatch, says));
    }
    return section("Which parameters train when", "Left: over the rounds, the layers from input (bottom) to classifier (top); for methods that cut the width of all layers alike, the channels of one layer. Right: the layers and their channels on one device, the first asked in the chosen round.",
      key, el("div", { class: "scrub" }, play, slider, output), grid);
  }

  // --- the page -------------------------------------------------------------------------------------------------
  // whose mean a card shows: seeds at different rounds are not averaged
  const counted = (group) => {
    const some = group.counted.length, all = group.seeds.length, one = `seed ${group.counted[0]}`;
    if (group.basis === "finished runs") return some > 1 ? `mean of the ${some} of ${all} seeds that are finished` : `${one}, which alone of ${all} seeds is finished`;
    if (some < all) return `${some > 1 ? `mean of ${some} seeds` : one}: ${all - some} of ${all} have not been evaluated yet`;
    return (some > 1 ? `mean of ${some} seeds` : one) + (group.basis === "last common round" && group.accuracy != null ? ", the last round in which all were evaluated" : "");
  };
  function cards() {
    const box = el("div", { class: "cards" });
    for (const group of data.groups) {
      const facts = [["highest on the way", group.best == null ? "–" : percent(group.best) + " %"], ["measured peak, a device", bytes(group.peak_bytes)], ["upload in all", bytes(group.upload_bytes)],
        ["download in all", bytes(group.download_bytes)], ["training operations", flops(group.train_flops)], ["time", duration(group.seconds)], ["devices dropped", `${group.failures.dropped} of ${group.failures.asked}`]];
      const over = group.over_bytes ? el("p", { class: "over", role: "alert", text: `Over its budget by ${bytes(group.over_bytes)}: a device with no more memory than that would have died.` }) : null;
      if (group.privacy) facts.push(["differential privacy", group.privacy]);
      const list = el("dl");
      for (const [name, value] of facts) list.append(el("dt", { text: name }), el("dd", { text: value }));
      const fill = el("i"); fill.style.width = (group.rounds ? Math.min(100, (100 * group.done) / group.rounds) : 0) + "%";
      const big = el("div", { class: "big", text: percent(group.accuracy) });
      big.append(el("small", { text: group.accuracy == null ? " not evaluated yet" : (group.accuracy_std == null ? "" : ` ± ${percent(group.accuracy_std)}`) + " %" }));
      box.append(el("article", { class: "card", colour: group.colour },
        el("div", { class: "name" }, el("span", { text: group.label }), el("span", { class: "tag " + group.status, text: group.status })), big,
        el("div", { class: "under", text: `test accuracy after ${group.at} of ${group.rounds} rounds, ${counted(group)}` }), el("div", { class: "bar" }, fill), over, list));
    }
    return box;
  }
  function accuracySection() {
    const one = chart(accuracyChart, "accuracy");
    const chips = data.groups.map((group) => el("button", { type: "button", class: "chip", colour: group.colour, text: group.label, title: "Show or hide", "aria-pressed": String(!hidden.has(group.label)), onclick: () => {
      if (hidden.has(group.label)) hidden.delete(group.label); else if (visible().length > 1) hidden.add(group.label);
      render();
    } }));
    const several = data.groups.some((group) => group.runs.length > 1);
    const bn = [...new Set(data.groups.map((group) => group.bn).filter(Boolean))].join(" or ");
    return section("Accuracy", `On the server's test data${bn ? ", batch-norm statistics " + bn : ""}.` + (several ? " Lines are the mean over seeds, bands one standard deviation, over the rounds that all seeds have." : ""),
      el("div", { class: "controls" },
        choices([["accuracy", "Accuracy"], ["loss", "Training loss"]], state.y, (value) => { state.y = value; one.draw(); }),
        choices([["rounds", "Rounds"], ["upload", "Upload"], ["flops", "FLOPs"], ["seconds", "Seconds"]], state.x, (value) => { state.x = value; one.draw(); }),
        tick("highest so far", "best", one.draw), several ? tick("each seed", "seeds", one.draw) : null),
      data.groups.length > 1 ? el("div", { class: "controls" }, ...chips) : null, one.place);
  }
  function costSection() {
    if (data.groups.filter((group) => group.accuracy != null).length < 2) return null;
    const list = el("ul", { class: "verdict" }, ...data.verdict.map((text) => el("li", { text })));
    const seeds = data.groups.every((group) => group.counted.length < 2) ? " With one seed each, accuracies closer than half a point are called a tie." : " Accuracies within half a point or two standard errors are called a tie.";
    return section("What accuracy costs", "True bytes: the measured peak of tensors on the largest device. Upload: of all devices, over all rounds." + seeds, list,
      el("div", { class: "two plain" }, chart(() => costChart("peak_bytes", "measured peak of a device"), "bytes").place, chart(() => costChart("upload_bytes", "uploaded by all devices"), "sent").place));
  }
  function stepsSection() {
    const stepped = visible().filter((group) => group.memory.steps.length > 1);
    if (!stepped.length) return null;
    const chosen = chart(stepsChart, "steps");
    return section("Steps over rounds", "Each step freezes what is settled and lays one more layer; steps without a round are skipped.", chosen.place);
  }
  function memorySection() {
    const one = chart(memoryChart, "memory"), stepped = data.groups.filter((group) => group.memory.steps.length > 1);
    const accountings = [...new Set(visible().map((group) => group.memory.accounting).filter(Boolean))].join(" and ");
    const single = data.groups.length === 1 && stepped.length === 1;
    const options = single ? [[data.groups[0].label, "by step"]] : [[null, "All methods"], ...stepped.map((group) => [group.label, group.label + ", by step"])];
    if (!options.some(([value]) => value === state.memory)) state.memory = options[0][0];
    const notes = [...new Set(visible().map((group) => group.memory.note).filter(Boolean))];
    const broken = visible().filter((group) => group.over_bytes).map((group) => group.label + " by " + bytes(group.over_bytes));
    const verdict = broken.length ? el("p", { class: "over", text: "Over the budget: " + broken.join(", ") + "." }) : null;
    const counted = accountings ? `Bars: what the ${accountings} accounting counts, the one the budget is given in. ` : "";
    const paper = accountings.includes("paper") ? " The paper's count is not true bytes: a diamond above its budget does not break it, and a device needs what the diamond says." : accountings ? " Both are true bytes: a diamond above the budget's line broke it." : "";
    return section("Memory against the budget", counted + "Diamonds: tensor bytes measured in training, of the largest single device." + paper, verdict,
      options.length > 1 ? el("div", { class: "controls" }, choices(options, state.memory, (value) => { state.memory = value; one.draw(); })) : null, one.place, ...notes.map((text) => el("p", { class: "note", text })));
  }
  function classSection() {
    const done = visible().filter((group) => group.per_class.length);
    if (!done.length) return section("Accuracy per class", "Written when a run is finished; none of these is yet.");
    return section("Accuracy per class", "Of the final model, in %." + (done.some((group) => group.runs.length > 1) ? " Mean over seeds." : "") + (done.length < visible().length ? " Unfinished runs are left out." : ""), chart(classChart, "classes").place);
  }
  function dataSection() {
    const parts = data.data.map((one) => {
      if (one.missing) return el("p", { class: "note", text: one.missing + (data.data.length > 1 ? ` (${one.labels.join(", ")})` : "") });
      const shown = one.counts.length < one.devices ? ` The first ${one.counts.length} of ${one.devices} devices are shown.` : "";
      const classes = one.classes.length < one.all_classes ? ` The first ${one.classes.length} of ${one.all_classes} classes.` : "";
      const held = one.counts.map((row) => row.filter(Boolean).length), mean = held.reduce((a, b) => a + b, 0) / Math.max(1, held.length);
      return el("div", {}, el("p", { class: "says", text: `${one.name}, partition ${one.partition}, seed ${one.seed}: ${one.devices} devices, ${mean.toFixed(1)} classes each on average.${shown}${classes}` + (data.data.length > 1 ? ` (${one.labels.join(", ")})` : "") }), chart(() => dataChart(one), "data").place);
    });
    return section("Who holds what", null, ...parts);
  }
  function failureSection() {
    const failed = visible().filter((group) => group.failures.dropped);
    if (!failed.length) return section("Device failures", "Every device that was asked answered with a good update.");
    const rows = failed.flatMap((group) => group.failures.reasons.map(({ reason, times }) => el("tr", {}, el("td", { text: group.label }), el("td", { text: reason }), el("td", { class: "num", text: times }))));
    const head = el("tr", {}, el("th", { text: "run" }), el("th", { text: "reason" }), el("th", { class: "num", text: "times" }));
    return section("Device failures", "Devices that were asked and whose update did not count, over all seeds.", chart(failureChart, "failures").place, el("div", { class: "scroll" }, el("table", {}, head, ...rows)));
  }
  function settingsSection() {
    const several = data.groups.length > 1;
    const make = (rows) => {
      const table = el("table", { class: "settings" }, el("tr", {}, el("th", { text: "setting" }), ...data.groups.map((group) => el("th", { text: group.label }))));
      for (const row of rows) {
        const same = !row.differs && several;
        table.append(el("tr", { class: row.differs ? "differs" : "" }, el("td", { text: row.name }), ...(same ? [el("td", { colspan: row.values.length, text: row.values[0] })] : row.values.map((value) => el("td", { text: value })))));
      }
      return el("div", { class: "scroll" }, table);
    };
    const seeds = data.groups.some((group) => group.runs.length > 1);
    const all = el("details", { open: state.details, ontoggle: (event) => { state.details = event.target.open; } },
      el("summary", { text: `All ${data.settings.length} settings and versions` }), make(data.settings));
    const versions = data.settings.filter((row) => row.name.startsWith("version of ") && !row.differs).map((row) => `${row.name.slice(11)} ${row.values[0]}`);
    const facts = el("p", { class: "note", text: versions.length ? `Made with ${versions.join(", ")}.` : "" });
    return section("Settings and versions", several ? "What differs" + (seeds ? "; of several seeds, the first." : ".") : null, several ? make(data.settings.filter((row) => row.differs)) : null, facts, all);
  }
  function render() {
    charts.length = 0;
    document.title = data.title;
    document.getElementById("title").textContent = data.title;
    document.getElementById("lead").textContent = data.lead.join(" · ");
    const old = main.querySelectorAll(".chart");
    const steps = data.groups.length ? stepsSection() : null;
    const blocks = data.groups.length
      ? [cards(), costSection(), accuracySection(), partsSection(), ...(steps ? [el("div", { class: "two" }, steps, memorySection())] : [memorySection()]), classSection(), dataSection(), failureSection(), settingsSection()].filter((block) => block != null)
      : [section("Waiting", "No run has begun in this folder yet.")];
    if (data.problems.length) blocks.push(section("What could not be read", null, ...data.problems.map((text) => el("p", { class: "note", text }))));
    const scroll = window.scrollY;
    main.style.minHeight = main.offsetHeight + "px"; // no jump while the new page is laid out
    old.forEach((place) => Plotly.purge(place));
    main.replaceChildren(...blocks);
    const foot = document.getElementById("foot");
    foot.textContent = `Made by Strata ${data.strata} on ${data.made}. `;
    if (data.files && data.files.length) {
      const stems = new Map();
      for (const file of data.files) { const [stem, ending] = file.split("."); stems.set(stem, [...(stems.get(stem) || []), ending]); }
      foot.append("Beside this page are ");
      let first = true;
      for (const [stem, endings] of stems) {
        foot.append(first ? "" : ", ", stem.replace("/", ": ").replace(/^(tables|figures): /, (kind) => (kind === "tables: " ? "table " : "figure ")), " (");
        endings.forEach((ending, i) => foot.append(i ? " " : "", el("a", { href: `${stem}.${ending}`, text: ending })));
        foot.append(")");
        first = false;
      }
      foot.append(".");
    }
    const drawn = charts.map((draw) => draw());
    nets.forEach(drawNet);
    return Promise.all(drawn).then(() => { main.style.minHeight = ""; window.scrollTo(0, scroll); root.dataset.drawn = String(charts.length); });
  }

  // --- theme, size, life ----------------------------------------------------------------------------------------
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let wish = "auto";
  try { wish = localStorage.getItem("strata-theme") || "auto"; } catch { /* a page from disk may have no storage */ }
  const asked = new URLSearchParams(location.search).get("theme");
  if (asked === "dark" || asked === "light") wish = asked;
  const button = document.getElementById("theme");
  const dress = () => {
    root.dataset.theme = wish === "auto" ? (system.matches ? "dark" : "light") : wish;
    button.textContent = { auto: "◐ Auto", light: "○ Light", dark: "● Dark" }[wish];
  };
  const again = () => { charts.forEach((draw) => draw()); nets.forEach(drawNet); };
  button.addEventListener("click", () => {
    wish = { auto: "light", light: "dark", dark: "auto" }[wish] || "auto";
    try { localStorage.setItem("strata-theme", wish); } catch { /* as above */ }
    dress(); again();
  });
  system.addEventListener("change", () => { dress(); again(); });
  let resizing = null;
  window.addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => nets.forEach(drawNet), 120); });

  function live() {
    const badge = document.getElementById("live");
    badge.hidden = false;
    const say = (text, kind) => { badge.textContent = text; badge.className = kind || ""; };
    let wanted = 0, shown = data.version, busy = false;
    const update = async () => {
      if (busy) return;
      busy = true;
      try {
        while (shown !== wanted) {
          const aim = wanted, answer = await fetch("data.json", { cache: "no-cache" });
          if (!answer.ok) throw new Error(answer.status);
          const last = state.round !== null && state.round >= longest() - 1;
          data = await answer.json();
          if (last) state.round = null; // stay at the newest round
          shown = aim;
          await render();
        }
      } catch { /* the stream tells when the server is back */ } finally { busy = false; }
      status();
    };
    const status = () => { const over = data.groups.length && data.groups.every((group) => group.status === "finished"); say(over ? "finished" : "live", over ? "ended" : ""); };
    const stream = new EventSource("events");
    stream.onopen = status;
    stream.onmessage = (event) => { wanted = Number(event.data); if (wanted !== shown) update(); else status(); };
    stream.onerror = () => say("not connected", "lost");
    status();
  }

  dress();
  render().then(() => { if (data.live) live(); });
})();
