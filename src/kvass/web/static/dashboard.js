// The dashboard: asks for the status and its history every two seconds, and shows them.
// Figures that are no longer true are grey, and the page says since when.
"use strict";
const KEPT = 1440, WINDOW_S = 300, GAP_S = 45;  // samples; what a rate is the mean of; without samples for longer, lines are broken
const EVERY_MS = 2000, ANSWER_MS = 8000;
const REASONS = {  // why tokens missed: kvass.core.metrics.MISSES in a few words
  absent: "not in the cache",
  no_window_here: "no window was stored there",
  evicted: "evicted for lack of room",
  over_quota: "evicted, tenant over its quota",
  not_stored: "its store did not finish",
  other_namespace: "stored with other settings",
  other_salt: "stored under another salt",
  other_adapter: "stored with another adapter",
  engine_busy: "the engine could not store it",
  tier_down: "a tier was down",
  not_waited: "too many lookups waited",
  not_worth_it: "a tier is slower than computing",
  no_room: "no room in L1 to load",
  load_failed: "a load failed",
  late: "tiers too slow",
  cleared: "cleared meanwhile",
  no_answer: "the daemon was late",
  load_failed_here: "the engine's copy failed",
  cheaper_to_compute: "computing was faster",
  not_loaded: "the engine did not load them",
  other_node: "another machine of the engine had less",
};
const FOR_TIME = ["not_waited", "not_worth_it", "cheaper_to_compute", "late"], FOR_ROOM = ["evicted", "over_quota", "no_room"];  // those for lack of time, and of memory
const reason = why => REASONS[why] ?? why.replaceAll("_", " ");
const number = n => Math.round(n).toLocaleString("en");
const percent = (a, b) => b > 0 ? (100 * a / b).toFixed(1) + " %" : "–";
const sum = (list, name) => list.reduce((all, one) => all + (one[name] || 0), 0);
const now = () => Date.now() / 1000;
function region(id, heads, rows, none) {  // a table; a cell is a text, or [text, second line, title]
  const made = document.createElement("table"), top = element("tr", "", element("thead", "", made)), body = element("tbody", "", made);
  made.className = heads.length > 3 ? "rows" : "";
  heads.forEach(text => { element("th", text, top).scope = "col"; });
  rows.forEach(row => {
    const line = element("tr", "", body);
    row.forEach((cell, i) => {
      const [text, more, title] = [cell].flat(), made = element("td", text, line);
      made.dataset.head = heads[i];
      if (more) element("small", more, made);
      if (title) made.title = title;
    });
  });
  if (rows.length) $(id).replaceChildren(made);
  else $(id).replaceChildren(Object.assign(element("p", none), { className: "empty" }));
}
function cards(id, entries) {  // [value, label, title]
  $(id).replaceChildren(...entries.map(([value, label, title]) => {
    const card = Object.assign(document.createElement("div"), { className: "card", title: title ?? "" });
    element("b", value, card);
    element("span", label, card);
    return card;
  }));
}

// ---- what was asked of the server

async function get(path) {
  const token = sessionStorage.getItem("token"), headers = token ? { Authorization: "Bearer " + token } : {};
  const reply = await fetch(path, { headers, signal: AbortSignal.timeout(ANSWER_MS) });
  if (reply.status === 401 && !$("ask").open) {
    $("ask").showModal();
    await new Promise(done => $("ask").addEventListener("close", done, { once: true }));
    sessionStorage.setItem("token", $("token").value);
  }
  const body = await reply.json();
  if (!reply.ok) throw Object.assign(new Error(body.error), { code: reply.status });
  return body;
}
const past = { columns: [], samples: [] };
let grown = [], status = null, statusAt = 0;
function column(name) {  // asked/MODEL, hit/TIER/MODEL, tenant-missed/REASON/TENANT: a model's name may have slashes
  const [kind, ...rest] = name.split("/"), of = kind.startsWith("tenant-") ? "tenant" : "model", what = kind.replace("tenant-", "");
  const by = ["hit", "missed"].includes(what) ? rest.shift() : "";
  return { what, by, of, whose: rest.join("/") };
}
const GAUGES = ["l1_used_bytes", "leases"];
// What grew between each sample and that of WINDOW_S before, by name; counters begin again at 0.
function growth() {
  const { columns, samples } = past, counted = columns.map((name, c) => c + 1).filter(c => !GAUGES.includes(columns[c - 1])), found = [];
  let first = 0;
  for (let i = 1; i < samples.length; i++) {
    if (counted.some(c => samples[i][c] < samples[i - 1][c])) first = i;
    while (first < i - 1 && samples[i][0] - samples[first][0] > WINDOW_S) first++;
    if (first === i) continue;
    const one = { at: samples[i][0], seconds: samples[i][0] - samples[first][0] };
    counted.forEach(c => { one[columns[c - 1]] = (samples[i][c] || 0) - (samples[first][c] || 0); });
    found.push(one);
  }
  return found;
}
function remember(history) {
  if (past.columns.some((name, c) => history.columns[c] !== name)) past.samples = [];  // another server's, whose numbers stand elsewhere
  past.columns = history.columns;
  past.samples = [...past.samples, ...history.samples].slice(-KEPT);
  offer();
  $("events").replaceChildren(...history.events.toReversed().map(([when, line]) => {
    const entry = element("li", "");
    element("time", day(when, true), entry);
    entry.append(line);
    return entry;
  }));
  if (!history.events.length) element("li", "none yet", $("events"));
}
function offer() {  // models and tenants to choose
  const shown = [...$("whose").options].map(option => option.value);
  past.columns.map(column).filter(c => c.what === "asked").forEach(({ of, whose }) => {
    if (shown.includes(of + "/" + whose)) return;
    const group = $("of-" + of) ?? Object.assign(element("optgroup", "", $("whose")), { id: "of-" + of, label: of + "s" });
    element("option", whose, group).value = of + "/" + whose;
  });
}

// ---- charts

function chosen() {
  const [of, ...rest] = $("whose").value.split("/");
  return { of: of || "model", whose: rest.join("/") };
}
const columnsOf = (what, { of, whose }) => past.columns.filter(name => {
  const c = column(name);
  return c.what === what && c.of === of && (!whose || c.whose === whose);
});
const total = (g, names) => names.reduce((all, name) => all + (g[name] || 0), 0);
function line(points) {  // the times of all samples, with the value of each point; null between points that are far apart
  const times = [], lists = [];
  points.forEach(([at, ...values], i) => {
    if (i && at - points[i - 1][0] > GAP_S) { times.push(at - 1); lists.push(values.map(() => null)); }
    times.push(at);
    lists.push(values);
  });
  return [times, Array.from({ length: lists[0]?.length ?? 0 }, (_, s) => lists.map(values => values[s]))];
}
function chart(id, names, points, how) {
  const [times, values] = line(points);
  draw(id, times, names, values.length ? values : names.map(() => []), { empty: "No figures yet: the first come after 20 seconds.", ...how });
}
function drawAll() {
  const all = { of: "model", whose: "" }, saved = columnsOf("saved", all), asked = columnsOf("asked", all), hits = columnsOf("hit", all);
  chart("saved", ["prefill saved per hour"], grown.map(g => [g.at, total(g, saved) * HOUR / g.seconds]), { unit: "time" });
  const tiers = [...new Set(hits.map(name => column(name).by))], upto = i => hits.filter(name => tiers.indexOf(column(name).by) <= i);
  chart("rate", tiers.map((tier, i) => (i ? "with " : "") + tier), grown.map(g => [g.at, ...tiers.map((_, i) =>
    total(g, asked) > 0 ? 100 * total(g, upto(i)) / total(g, asked) : null)]), { unit: "share", most: 100, empty: "No lookups in this time." });
  const used = past.columns.indexOf("l1_used_bytes") + 1;
  chart("memory", ["L1 used"], past.samples.map(sample => [sample[0], sample[used]]), { unit: "bytes", most: status?.l1_capacity_bytes });
  const flows = [...past.columns.filter(name => /^(in|out)\//.test(name)), "evicted"];
  chart("moved", flows.map(name => name === "evicted" ? "evicted from l1" : name.split("/").reverse().join(" ")),
    grown.map(g => [g.at, ...flows.map(name => g[name] / g.seconds)]), { unit: "bandwidth" });
  drawReasons();
}
function drawReasons() {
  const asked = columnsOf("asked", chosen()), missed = columnsOf("missed", chosen());
  const order = [...new Set([...Object.keys(REASONS), ...missed.map(name => column(name).by)])];
  const whys = order.filter(why => missed.some(name => column(name).by === why));
  const of = whys.map(why => missed.filter(name => column(name).by === why));
  chart("reasons", whys.map(reason), grown.map(g => [g.at, ...of.map(names => total(g, asked) > 0 ? 100 * total(g, names) / total(g, asked) : null)]),
    { unit: "share", stacked: true, empty: "No misses in this time." });
}

// ---- figures

function show() {
  const s = status, trouble = s.troubles.length > 0;
  $("state").textContent = trouble ? "degraded" : "up";
  $("state").className = trouble ? "down" : "up";
  $("about").textContent = [s.host && "on " + s.host, "version " + s.version, "up " + span(s.up_s), "boot " + s.boot.slice(0, 8)].filter(Boolean).join(", ");
  document.title = s.host ? "kvass on " + s.host : "kvass";
  $("troubles").replaceChildren(...s.troubles.map(text => element("li", text)));
  $("troubles").hidden = !trouble;
  $("notes").replaceChildren(...s.notes.map(text => element("li", text)));
  $("notes").hidden = !s.notes.length;
  const models = [...s.namespaces, ...s.forgotten];
  working(s, models);
  saving(s, models);
  lacking(s, models);
  missing(s, models);
  shadow(models.filter(ns => ns.shadow));
}
function working(s, models) {
  const whole = s.engines.filter(e => !e.missing_ranks.length && e.scheduler).length, answers = s.histograms.lookup_core_seconds;
  const last = grown.at(-1), times = sum(answers.counts.map(n => ({ n })), "n");
  cards("working", [
    [number(s.engines.length), s.engines.length === whole ? "engines connected" : "engines connected, of which " + (s.engines.length - whole) + " lack a rank or their scheduler"],
    [last ? number(last.lookups * 60 / last.seconds) : "–", "lookups per minute, mean of five minutes"],
    [percent(sum(models, "minute_hit_tokens"), sum(models, "minute_lookup_tokens")), "hit rate in the last minute", HIT_RATE],
    [times ? (1000 * answers.sum / times).toFixed(2) + " ms" : "–", "mean time of a lookup in the daemon"],
  ]);
  $("no-engines").hidden = s.engines.length > 0;
  $("engines").hidden = !s.engines.length;
  $("no-lookups").hidden = !s.engines.length || s.engines.some(e => e.lookup_tokens);
  region("engines", ["engine", "connected since", "hit rate", "prefill saved", "last lookup", "pids", "ranks", "state"], s.engines.map(e => [
    [e.model || "unnamed model", e.instance, e.instance], e.connected_s == null ? "?" : day(statusAt - e.connected_s),
    e.shadow ? ["none", "see shadow mode below"] : [percent(e.hit_tokens, e.lookup_tokens), number(e.hit_tokens) + " tokens", HIT_RATE],
    e.shadow ? "none" : saved([e]), span(e.seen_s) + " ago",
    [e.pids.filter(pid => pid).slice(0, 2).join(", ") + (e.pids.length > 2 ? " …" : "") || "not known",
      "uid " + e.uids.join(", ") + (e.container ? ", container " + e.container : ""), "processes " + e.pids.join(", ")],
    e.ranks - e.missing_ranks.length + " of " + e.ranks, state(e)]), "");
}
function state(e) {
  if (e.missing_ranks.length) return "waits for ranks " + e.missing_ranks.slice(0, 8).join(", ");
  if (!e.scheduler) return "its scheduler is gone";
  return e.shadow ? "shadow mode" : "connected";
}
const HIT_RATE = "tokens that kvass gave, of the tokens that were looked up in kvass: those that the engine did not have in its own cache";
const unknown = those => sum(those, "hit_tokens") > 0 && !those.some(one => one.saved_prefill_s);  // no engine has told its speed
const saved = those => unknown(those) ? "not known yet" : span(sum(those, "saved_prefill_s"));
function saving(s, models) {
  const last = grown.at(-1), columns = columnsOf("saved", { of: "model", whose: "" }), hits = sum(models, "hit_tokens");
  const failed = sum(models, "failed_loads");
  cards("saving", [
    [last && !unknown(models) ? span(total(last, columns) * HOUR / last.seconds) : "–", "of prefill saved per hour, mean of five minutes"],
    [saved(models), "of prefill saved since start"],
    [number(hits), "tokens not computed since start"],
    [percent(hits, sum(models, "lookup_tokens")), "hit rate since start", HIT_RATE],
    ...failed ? [[number(failed), "of " + number(sum(models, "loads")) + " loads failed since start"]] : [],
  ]);
  $("no-speed").hidden = !unknown(models);
}
function lacking(s, models) {
  const counters = s.counters, asked = sum(models, "lookup_tokens"), missedFor = whys => models.reduce((all, ns) => all + whys.reduce((some, why) => some + (ns.miss_tokens[why] || 0), 0), 0);
  const tiers = s.tiers.filter(t => t.place !== 0).sort((a, b) => a.place - b.place), room = tiers.find(t => t.capacity_bytes);
  cards("lacking", [
    [percent(s.l1_used_bytes, s.l1_capacity_bytes), size(s.l1_used_bytes) + " of " + size(s.l1_capacity_bytes) + " memory used"],
    models.some(ns => "evicted" in ns.miss_tokens) ? [percent(missedFor(FOR_ROOM), asked), "of looked-up tokens missed for lack of memory", FOR_ROOM.map(reason).join(", ")]
      : [percent(counters.unread_bytes_evicted, counters.l1_in_bytes), "of bytes stored were evicted unread", "much of it: L1 is too small"],
    room ? [percent(room.bytes, room.capacity_bytes), size(room.bytes ?? 0) + " of " + size(room.capacity_bytes) + " of tier " + room.tier.split(":")[0] + " used"]
      : [tiers.length ? size(sum(tiers, "bytes")) : "none", tiers.length ? "in tiers" : "no tier behind L1"],
    [percent(missedFor(FOR_TIME), asked), "of looked-up tokens missed for lack of time", FOR_TIME.map(reason).join(", ")],
  ]);
  bar(s);
  region("tiers", ["tier", "state", "holds", "stored", "loaded", "failed", "queue", "oldest", "speed"], tiers.map(t => [
    t.tier, t.up ? (s.troubles.some(text => text.startsWith("tier " + t.tier + ":")) ? "degraded" : "up") + (t.over_budget ? ", over its write budget" : "") + (t.refused_records ? ", " + number(t.refused_records) + " requests for records refused" : "") : "down",
    "bytes" in t ? size(t.bytes) : "?", size(t.stored_bytes), size(t.loaded_bytes), number(t.store_failures + t.load_misses),
    number(t.flush_queue_rows) + " rows", span(t.flush_queue_oldest_s), t.load_bytes_s ? size(t.load_bytes_s) + "/s" : "–"]),
    "There is no tier: what leaves L1 is computed again. kvass serve --tier adds one.");
  region("leases", ["", "open", "oldest"], [["leases (read)", number(s.leases), span(s.lease_oldest_s)],
    ["reservations (write)", number(s.reservations), span(s.reservation_oldest_s)]]);
  region("evicted", ["reason", "bytes"], [...Object.entries(counters).filter(([name, n]) => n && name.startsWith("bytes_evicted_"))
    .map(([name, n]) => [name.slice(14).replaceAll("_", " "), size(n)]), ["of these never read", [size(counters.unread_bytes_evicted), percent(counters.unread_bytes_evicted, counters.l1_in_bytes) + " of all that was stored"]]]);
  region("counters", ["counter", "count"], Object.entries(counters).filter(([, n]) => n).map(([name, n]) => [name, number(n)]), "All are 0.");
}
function bar(s) {
  const groups = s.namespaces.flatMap(ns => ns.groups), of = name => groups.reduce((all, group) => all + group[name] * group.row_bytes, 0);
  const parts = [["held", of("rows")], ["writing", of("rows_writing")], ["loading", of("rows_loading")],
    ["quarantined", sum(groups, "quarantined_bytes")], ["cleared", s.l1_cleared_bytes]];
  $("bar").replaceChildren(...parts.map(([, bytes], i) => {
    const piece = element("i", "");
    piece.style.width = 100 * bytes / s.l1_capacity_bytes + "%";
    piece.style.background = color(i);
    return piece;
  }));
  legend($("legend"), [...parts.filter(([, bytes], i) => !i || bytes).map(([name, bytes]) => [name + " " + size(bytes), color(parts.findIndex(p => p[0] === name))]),
    ["free " + size(s.l1_capacity_bytes - s.l1_used_bytes), "var(--line)"]]);
  region("groups", ["model", "group", "rows", "bytes of a row", "used"], s.namespaces.flatMap(ns => ns.groups.map(
    g => [[ns.model || "unnamed", ns.namespace.slice(0, 8)], g.group + " " + g.kind, number(g.rows), size(g.row_bytes), size(g.used_bytes)])), "There are none.");
}
function most(misses) {  // the reason of most misses
  const [why, n] = Object.entries(misses ?? {}).sort((a, b) => b[1] - a[1])[0] ?? ["", 0];
  return n ? [reason(why), number(n) + " tokens"] : "–";
}
function missing(s, models) {
  const { of, whose } = chosen(), misses = {};
  const those = of === "tenant" ? s.tenants.filter(t => t.tenant === whose) : models.filter(ns => !whose || (ns.model || "unnamed") === whose);
  those.forEach(one => Object.entries(one.miss_tokens ?? {}).forEach(([why, n]) => { misses[why] = (misses[why] || 0) + n; }));
  const asked = sum(those, "lookup_tokens");
  region("misses", ["looked-up tokens", "share", "tokens"], [["hit", percent(sum(those, "hit_tokens"), asked), number(sum(those, "hit_tokens"))],
    ...Object.entries(misses).filter(([, n]) => n).sort((a, b) => b[1] - a[1]).map(([why, n]) => [reason(why), percent(n, asked), number(n)])]);
  region("models", ["model", "hit rate", "last minute", "tokens hit", "tokens missed", "most misses", "tokens stored", "L1"], s.namespaces.map(ns => [
    [ns.model || "unnamed", "namespace " + ns.namespace.slice(0, 8), ns.namespace], percent(ns.hit_tokens, ns.lookup_tokens), percent(ns.minute_hit_tokens, ns.minute_lookup_tokens),
    number(ns.hit_tokens), number(ns.lookup_tokens - ns.hit_tokens), most(ns.miss_tokens), number(ns.stored_tokens), size(sum(ns.groups, "used_bytes"))]), "No model yet: an engine brings it.");
  region("tenants", ["tenant", "hit rate", "last minute", "tokens missed", "most misses", "memory", "cap", "reserved", "evicted"], s.tenants.filter(t => t.quota || t.lookups || t.l1_bytes).map(t => [t.tenant,
    percent(t.hit_tokens, t.lookup_tokens), percent(t.minute_hit_tokens, t.minute_lookup_tokens), number(t.lookup_tokens - t.hit_tokens), most(t.miss_tokens),
    size(t.l1_bytes), t.cap_bytes === null ? "none" : size(t.cap_bytes), size(t.reserved_bytes), size(t.evicted_bytes)]), "No tenant has asked anything yet.");
}
function shadow(found) {
  $("shadow").hidden = !found.length;
  if (!found.length) return;
  const name = ns => [ns.model || "unnamed model", ns.namespace ? "namespace " + ns.namespace.slice(0, 8) : "removed namespaces"];
  const all = found.map(ns => ns.shadow), largest = one => Math.max(0, ...one.groups.map(g => g.largest_difference));
  const differ = sum(all, "differing_rows");
  cards("would", [
    [percent(sum(all, "hit_tokens"), sum(all, "lookup_tokens")), "would-be hit rate", HIT_RATE],
    [all.every(one => one.saved_s === null) ? "not known yet" : span(sum(all, "saved_s")), "of prefill would have been saved"],
    [span(sum(all, "load_s")), "is what " + number(sum(all, "loads")) + " loads of " + size(sum(all, "load_bytes")) + " took"],
    [largest({ groups: all.flatMap(one => one.groups) }).toPrecision(3) * 1 + "", differ ? "largest difference; " + number(differ) + " rows differ, " + number(sum(all, "wrong_rows")) + " are wrong" : "largest difference between loaded and computed KV"],
  ]);
  region("shadows", ["model", "hits sampled", "would-be hit rate", "would have saved", "loads took", "compared", "not compared", "rows that differ"], found.map(({ shadow: one, ...ns }) => [
    name(ns), (100 * one.sampled).toFixed(0) + " %", percent(one.hit_tokens, one.lookup_tokens), one.saved_s === null ? "not known yet" : span(one.saved_s), span(one.load_s),
    size(one.compared_bytes), number(one.not_compared) + " hits", [number(one.differing_rows), number(one.wrong_rows) + " wrong"]]));
  region("differences", ["model", "layer group", "largest difference", "compared"], found.flatMap(({ shadow: one, ...ns }) => one.groups.map(g => [
    name(ns), g.group + " " + g.kind, g.largest_difference ? g.largest_difference.toPrecision(3) + " at a value of " + g.at_value.toPrecision(3) : "0", size(g.compared_bytes)])), "Nothing was compared yet.");
}

// ---- all of it, every two seconds

function away(error) {  // says that the figures are old, and since when
  const at = statusAt || past.samples.at(-1)?.[0];
  const [what, more] = error instanceof TypeError ? ["The dashboard's server does not answer.", "If kvass serve --http started it, the daemon has ended too: start it again."]
    : error.name === "TimeoutError" ? ["The dashboard's server does not answer.", "It had " + ANSWER_MS / 1000 + " s."]
      : error.code === 503 ? ["The daemon does not answer.", "What was seen: " + error.message + ". Until it answers, engines compute everything themselves."]
        : ["The dashboard's server refused to answer.", "It says: " + error.message + "."];
  $("state").textContent = "down";
  $("state").className = "down";
  $("troubles").hidden = $("notes").hidden = true;
  $("away").replaceChildren(element("b", what));
  $("away").append(more + " " + (statusAt ? "The figures below are those of " : at ? "There are no figures but the charts, which end at " : "There are no figures yet.") +
    (at ? day(at, true) + ", " + span(Math.max(0, now() - at)) + " ago." : ""));
  $("away").hidden = false;
  document.body.classList.add("stale");
}
function back() {
  $("away").hidden = true;
  document.body.classList.remove("stale");
  $("clock").textContent = "Figures of " + clock(statusAt, true) + ". Times are in " + zone() + ".";
}
let busy = false;
async function refresh() {
  if (busy || document.hidden || $("ask").open) return;
  busy = true;
  try {
    const history = await get("api/v1/history?since=" + (past.samples.at(-1)?.[0] ?? 0)), first = !status;
    remember(history);
    if (history.samples.length) grown = growth();
    try {
      status = await get("api/v1/status");
      statusAt = now();
    } finally {
      if (history.samples.length || first) drawAll();
    }
    show();
    back();
  } catch (error) {
    away(error);
  } finally {
    busy = false;
  }
}
function zone() {
  const minutes = -new Date().getTimezoneOffset(), sign = minutes < 0 ? "−" : "+";
  const offset = minutes ? sign + Math.floor(Math.abs(minutes) / 60) + (minutes % 60 ? ":" + Math.abs(minutes % 60) : "") : "";
  return Intl.DateTimeFormat().resolvedOptions().timeZone + " (UTC" + offset + ")";
}
function repaint() { forget(); drawAll(); }
$("whose").addEventListener("change", () => { drawReasons(); if (status) missing(status, [...status.namespaces, ...status.forgotten]); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
document.addEventListener("visibilitychange", refresh);
refresh();
setInterval(refresh, EVERY_MS);
