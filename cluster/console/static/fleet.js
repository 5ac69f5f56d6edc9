// The cluster at a glance: how it is, what went wrong, who is at work; and a search of all sessions.

import { get, stream } from "./api.js";
import { h, show, sync, text } from "./dom.js";
import { age, brief, clock, kind, moment, money, short, summary, words } from "./format.js";
import { link, makeRow, table, updateRow } from "./rows.js";
import { Search } from "./search.js";

const RECENT_US = 4_000_000;

function counted(status, text) {
  return [h("span", { class: "counted" }, h("span", { class: `dot ${status}` }), text), " "];
}

function card(title, value, ...more) {
  return h("div", { class: "card" }, h("h2", null, title), h("div", { class: "big" }, value), h("div", { class: "quiet" }, ...more));
}

function restored(rates) {
  const after = rates.restores ? `${rates.restores} restored, within ${age(rates.restore)}` : rates.crashes > rates.only_waited ? "none restored yet" : "";
  return [after, rates.only_waited ? `${rates.only_waited} only waited` : ""].filter(Boolean).join(", ") || "nothing to restore";
}

function cards(snapshot) {
  const roles = {};
  for (const service of snapshot.services) roles[service.role] = (roles[service.role] || 0) + 1;
  const supervisor = snapshot.services.find((service) => service.role === "supervisor");
  const trouble = snapshot.problem || snapshot.services_problem;
  const statuses = Object.entries(snapshot.statuses).sort();
  const working = statuses.reduce((sum, [, count]) => sum + count, 0);
  const { rates, totals } = snapshot;
  const bad = ["failed", "quarantined"].filter((status) => totals.latest[status]);
  return [
    card("Cluster", h("span", { class: trouble ? "bad" : "good" }, trouble ? "trouble" : "healthy"),
      `supervisor ${supervisor ? supervisor.pid : "–"} · ${roles.node || 0} node${roles.node === 1 ? "" : "s"}`),
    card("Actors", String(roles.frame || 0), `at work, ${roles.standby || 0} standing by`),
    card("Sessions at work", String(working),
      statuses.map(([status, count]) => counted(status, `${count} ${words(status)}`))),
    card("Tokens, last minute", short(rates.tokens), `${rates.calls} calls${rates.calls_failed ? `, ${rates.calls_failed} failed` : ""}` +
      (rates.cost ? ` · cost ${money(rates.cost)}` : "")),
    card("Crashes, last minute", h("span", { class: rates.crashes ? "bad" : "" }, String(rates.crashes)), restored(rates)),
    card("All sessions", String(totals.sessions),
      bad.length ? bad.map((status) => counted(status, `${totals.latest[status]} ${status}`)) : "none failed lately"),
  ];
}

function problems(snapshot) {
  return [snapshot.problem, snapshot.services_problem].filter(Boolean).map((problem) =>
    h("p", { class: "problem", role: "alert" }, `${problem.message} ${problem.hint}`,
      snapshot.as_of ? ` Shown as of ${clock(snapshot.as_of)}.` : ""));
}

const COLUMNS = ["Agent", "Status", "Since", "Round", "Tokens", "Cost", "Restarts", "Pid", "Session"];

export function fleetView(main, wanted, page) {
  const top = h("div", { class: "cards" }), trouble = h("div");
  const incidents = h("ol", { class: "incidents" }), calm = h("p", { class: "quiet" });
  const { body, element } = table("Sessions at work", COLUMNS);
  const rest = h("p", { class: "quiet" });
  const all = new Search(wanted.query, page);
  main.append(h("h1", { class: "hidden" }, "Cluster"), trouble, top,
    h("section", { class: "panel" }, h("h2", null, "At work"), element, rest),
    all.panel, h("section", { class: "panel" }, h("h2", null, "What happened"), incidents, calm));
  let snapshot;
  // Of the rows only those come that have changed, and their order if that has.
  function changed({ rows, order, ...more }) {
    const known = new Map([...snapshot.sessions, ...rows].map((row) => [row.session_id, row]));
    shown({ ...snapshot, ...more, sessions: (order || snapshot.sessions.map((row) => row.session_id)).map((id) => known.get(id)) });
  }
  function shown(latest) {
    snapshot = latest;
    all.changed(snapshot.totals);
    show(trouble, problems(snapshot));
    show(top, cards(snapshot));
    const crashed = new Set(snapshot.incidents.filter((item) => item.type === "session_crashed" && snapshot.at - item.at < RECENT_US)
      .map((item) => item.session_id));
    sync(body, snapshot.sessions, (row) => row.session_id, (row) => makeRow(row, COLUMNS),
      (made, row) => updateRow(made, row, snapshot.at, crashed.has(row.session_id)));
    const working = Object.values(snapshot.statuses).reduce((sum, count) => sum + count, 0);
    text(rest, !working ? "No session has work to do." :
      working > snapshot.sessions.length ? `${working - snapshot.sessions.length} more; search for them below.` : "");
    text(calm, snapshot.incidents.length ? "" : "Nothing out of the ordinary.");
    sync(incidents, snapshot.incidents, (item) => `${item.session_id}/${item.seq}`, (item) =>
      h("li", null, h("time", null, moment(item.at)), " ", h("span", { class: `pill ${kind(item)}` }, words(item.type)), " ",
        item.session_id ? link(item.session_id, item.agent, " ", brief(item.session_id)) : item.agent, " ", h("span", { class: "summary" }, summary(item))), () => {});
  }
  const leave = stream("/api/fleet/stream", { fleet: shown, change: changed }, { state: page.state, refused: page.refused, check: () => get("/api/me").then((me) => {
    if (me.locked) page.refused(Object.assign(new Error("locked"), { status: 401 }));
  }) });
  leave.go = (next) => all.go(next.query);
  return leave;
}
