"use strict";
// Every text of the run goes in as text content, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const at = (id) => document.getElementById(id);

function element(name, text, classes) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (classes) made.className = classes;
  return made;
}

function svg(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function figureText(value, digits, unit) {
  if (value === null || value === undefined) return null;
  const shown = digits === null ? String(value) : value.toFixed(digits).replace(/\B(?=(\d{3})+(?!\d))(?<!\.\d*)/g, ",");
  return unit ? `${shown} ${unit}` : shown;
}

function duration(seconds) {
  if (seconds === null) return null;
  const whole = Math.round(seconds);
  const two = (number) => String(number).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

function showFigures(view) {
  const run = view.run;
  const figures = run === null ? [] : [
    ["step", "step", figureText(run.step, null)],
    ["loss", "loss", figureText(run.loss, 4)],
    ["eval_loss", "eval loss", figureText(run.eval_loss, 4)],
    ["tokens_per_s", "tokens/s", figureText(run.tokens_per_s, 0)],
    ["step_s", "step time", figureText(run.step_s, 3, "s")],
    ...(run.state === "running" ? [["left_s", "time left", duration(run.left_s)]] : []),
  ];
  at("figures").replaceChildren(...figures.map(([key, name, text]) => {
    const card = element("div");
    const value = element("strong", text === null ? view.shown.not_available : text);
    value.dataset.figure = key;
    card.append(element("span", name), value);
    return card;
  }));
}

function curve(title, series, clock) {
  const drawn = series.filter(([points]) => points && points.length > 1);
  if (drawn.length === 0) return null;
  const all = drawn.flatMap(([points]) => points);
  const [width, height, left, bottom] = [420, 150, 52, 18];
  const xs = all.map((point) => point[0]), ys = all.map((point) => point[1]);
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const place = ([x, y]) => {
    const across = x1 > x0 ? (x - x0) / (x1 - x0) : 0.5;
    const up = y1 > y0 ? (y - y0) / (y1 - y0) : 0.5;
    return `${(left + across * (width - left - 6)).toFixed(1)},${(height - bottom - 6 - up * (height - bottom - 16)).toFixed(1)}`;
  };
  const short = (value) => Math.abs(value) >= 10000 ? value.toExponential(1) : String(Number(value.toPrecision(4)));
  const label = (x) => clock ? new Date(x * 1000).toLocaleTimeString() : short(x);
  const picture = svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title});
  picture.append(
    svg("line", {x1: left, y1: height - bottom, x2: width, y2: height - bottom}),
    svg("text", {x: left - 5, y: 14, "text-anchor": "end"}, short(y1)),
    svg("text", {x: left - 5, y: height - bottom - 3, "text-anchor": "end"}, short(y0)),
    svg("text", {x: left, y: height - 4}, label(x0)),
    svg("text", {x: width - 2, y: height - 4, "text-anchor": "end"}, label(x1)),
    ...drawn.map(([points, kind]) => svg("polyline", {points: points.map(place).join(" "), class: kind})),
  );
  const made = element("figure");
  made.append(element("figcaption", title), picture);
  return made;
}

function showCurves(view) {
  const steps = view.curves_by_step, times = view.curves_by_time;
  const curves = [
    curve(steps.eval_loss.length > 1 ? "loss by step; orange: held-out" : "loss by step", [[steps.loss, "first"], [steps.eval_loss, "second"]], false),
    curve("tokens/s by step", [[steps.tokens_per_s, "first"]], false),
    curve("GPU utilisation, % (mean); orange: memory", [[times.gpu_utilization_pct, "first"], [times.gpu_memory_pct, "second"]], true),
    curve("host memory available, GiB", [[times.host_available_gib, "first"]], true),
  ];
  at("curves").replaceChildren(...curves.filter((made) => made !== null));
}

function showTables(view) {
  at("tables").replaceChildren(...view.shown.tables.flatMap((table) => {
    const made = element("table", undefined, table.title === "Alerts" ? "alerts" : "");
    made.dataset.table = table.title;
    const heading = element("tr");
    heading.append(...table.columns.map((name) => element("th", name)));
    const rows = table.rows.map((cells) => {
      const row = element("tr", undefined, table.title === "Alerts" ? cells[1] : "");
      row.append(...cells.map((cell) => element("td", cell)));
      return row;
    });
    made.append(heading, ...rows);
    const scroll = element("div", undefined, "scroll");
    scroll.append(made);
    return [element("h2", table.title), scroll];
  }));
}

function show(view) {
  document.title = view.shown.title + " · trainwright";
  at("title").textContent = view.shown.title;
  at("status").textContent = view.shown.status.join("\n");
  const run = view.run, bar = at("progress");
  bar.hidden = run === null || !run.total_steps;
  if (!bar.hidden) bar.value = run.step / run.total_steps;
  showFigures(view);
  showCurves(view);
  showTables(view);
  at("notes").replaceChildren(...view.shown.notes.map((note) => element("li", note)));
  at("connection").textContent = "as of " + new Date(view.time_s * 1000).toLocaleTimeString();
  document.body.dataset.time = view.time_s;
}

const source = new EventSource("events");
source.onmessage = (message) => show(JSON.parse(message.data));
source.onerror = () => { at("connection").textContent = "not connected: these figures are the last that came"; };
