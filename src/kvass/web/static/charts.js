// Charts over time: axes with units, the browser's time zone, and the values under the pointer.
// All charts have the same span of time, and the pointer over one shows the values of all.
"use strict";
const charts = {};  // by id: the drawn chart, and what it was drawn of
const $ = id => document.getElementById(id);
const WIDE = 74, TALL = 190;  // pixels: of the labels of y, of a chart
const POWERS = Array.from({ length: 51 }, (_, i) => 2 ** i);
const MINUTE = 60, HOUR = 3600;
const UNITS = {  // what a value says, and where an axis may have its lines
  share: { say: v => v.toFixed(1) + " %", axis: v => v + " %", steps: [1, 2, 5, 10, 20, 50], least: 5 },
  bytes: { say: size, axis: size, steps: POWERS, least: 1024 },
  bandwidth: { say: v => size(v) + "/s", axis: v => size(v) + "/s", steps: POWERS, least: 1024 },
  time: { say: span, axis: span, least: 1, steps: [.1, .2, .5, 1, 2, 5, 10, 20, MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 30 * MINUTE,
    ...[1, 2, 5, 10, 24, 48, 120, 240, 480, 1200, 2400].map(n => n * HOUR)] },
};
function size(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < 4) { n /= 1024; i++; }
  return (i && n % 1 ? n.toFixed(1) : Math.round(n)) + " " + units[i];
}
function span(s) {
  const [n, unit] = s < 60 ? [s, "s"] : s < HOUR ? [s / 60, "min"] : s < 48 * HOUR ? [s / HOUR, "h"] : [s / 24 / HOUR, "days"];
  return (n % 1 && n < 100 ? n.toFixed(1) : Math.round(n)) + " " + unit;
}
function element(tag, text, parent) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (parent) parent.append(made);
  return made;
}
const color = i => "var(--c" + Math.min(i, 11) + ")";
const paint = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const clock = (s, seconds) => new Date(1000 * s).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...(seconds && { second: "2-digit" }) });
function day(s, seconds) {  // the date too, if it is not today's
  const at = new Date(1000 * s), today = at.toDateString() === new Date().toDateString();
  return (today ? "" : at.toLocaleDateString("en-GB", { day: "numeric", month: "short" }) + ", ") + clock(s, seconds);
}
function legend(parent, entries, when) {  // entries: [text, color] each
  parent.replaceChildren(...entries.map(([text, hue]) => {
    const entry = element("span", "");
    element("i", "", entry).style.background = hue;
    entry.append(text);
    return entry;
  }));
  if (when) element("time", when, parent);
}
function say(chart) {  // the values under the pointer; else the last ones
  const { plot, names, values, unit, times } = chart, at = plot.cursor.idx ?? times.length - 1;
  const entries = names.map((name, i) => {
    const value = values[i][at];
    return [name + " " + (value == null ? "–" : UNITS[unit].say(value)), color(i)];
  });
  legend(chart.legend, entries, times.length ? "at " + clock(times[at], true) : "");
}
function options(chart, width) {
  const { names, unit, stacked, most } = chart, { axis, steps, least } = UNITS[unit];
  const rule = { font: "12px system-ui, sans-serif", stroke: paint("--dim"), grid: { stroke: paint("--line"), width: 1 }, ticks: { stroke: paint("--line"), size: 4 } };
  return {
    width, height: TALL, legend: { show: false }, padding: [8, 8, 0, 0],
    cursor: { sync: { key: "time" }, drag: { x: false, y: false }, y: false, points: { show: !stacked } },
    scales: {
      x: { range: (_, low, high) => [Math.min(low, high - MINUTE), high] },
      y: { range: (_, low, high) => [0, Math.max(most ?? 0, least, (high || 0) * (most ? 1 : 1.08))] },
    },
    axes: [
      { ...rule, size: 28, space: 70, values: (_, splits, __, ___, step) => splits.map(s => clock(s, step < MINUTE)) },
      { ...rule, size: WIDE, incrs: steps, values: (_, splits) => splits.map(axis) },
    ],
    series: [{}, ...names.map((label, i) => ({
      label, stroke: paint("--c" + Math.min(i, 11)), width: stacked ? 1 : 1.75, fill: stacked ? paint("--c" + Math.min(i, 11)) : undefined, points: { size: 4 },
    }))],
    hooks: { setCursor: [() => say(chart)] },
  };
}
// Draws ``names`` over ``times``, each with its ``values``; null where there is none. Stacked: each stands on those after it.
function draw(id, times, names, values, { unit, stacked = false, most, empty }) {
  const whole = values.some(list => list.some(value => value != null)), place = $(id);
  const key = JSON.stringify([names, most, whole]);
  if (charts[id]?.key !== key) {
    charts[id]?.plot.destroy();
    delete charts[id];
    place.replaceChildren();
    if (!whole) { element("p", empty, place).className = "empty"; return; }
    const chart = charts[id] = { key, names, unit, stacked, most, times, values };
    chart.plot = new uPlot(options(chart, place.clientWidth), [[], ...names.map(() => [])], place);
    chart.legend = element("div", "", place);
    chart.legend.className = "legend";
    chart.plot.root.role = "img";
  }
  if (!whole) return;
  const chart = Object.assign(charts[id], { times, values });
  chart.plot.setData([times, ...(stacked ? values.map((_, i) => times.map((__, t) => values[i][t] == null ? null : sumOf(values.slice(i), t))) : values)]);
  chart.plot.root.ariaLabel = names.map((name, i) => name + " " + UNITS[unit].say(values[i].findLast(value => value != null) ?? 0)).join(", ");
  say(chart);
}
const sumOf = (lists, t) => lists.reduce((all, list) => all + (list[t] || 0), 0);
function forget() {  // to draw all again, in other colors
  Object.entries(charts).forEach(([id, chart]) => { chart.plot.destroy(); delete charts[id]; $(id).replaceChildren(); });
}
const sizes = new ResizeObserver(places => places.forEach(({ target }) =>
  charts[target.id]?.plot.setSize({ width: target.clientWidth, height: TALL })));
document.querySelectorAll(".chart").forEach(place => sizes.observe(place));
