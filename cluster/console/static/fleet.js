// The cluster at a glance: how it is, what went wrong, who is at work; and a search of all sessions.

import { get, stream } from "./api.js";
import { h, rowKeys, show, sync, text } from "./dom.js";
import { age, brief, clock, kind, moment, money, short, told, words } from "./format.js";

const RECENT_US = 4_000_000;

export function pill(status) {
  return h("span", { class: `pill ${status}` }, words(status));
}

export function link(session, ...content) {
  return h("a", { href: `#/session/${encodeURIComponent(session)}`, title: session }, ...content);
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
      statuses.map(([status, count]) => [h("span", { class: `dot ${status}` }), `${count} ${words(status)} `])),
    card("Tokens, last minute", short(rates.tokens), `${rates.calls} calls${rates.calls_failed ? `, ${rates.calls_failed} failed` : ""}` +
      (rates.cost ? ` · cost ${money(rates.cost)}` : "")),
    card("Crashes, last minute", h("span", { class: rates.crashes ? "bad" : "" }, String(rates.crashes)), restored(rates)),
    card("All sessions", String(totals.sessions),
      bad.length ? bad.map((status) => [h("span", { class: `dot ${status}` }), `${totals.latest[status]} ${status} `]) : "none failed lately"),
  ];
}

function problems(snapshot) {
  return [snapshot.problem, snapshot.services_problem].filter(Boolean).map((problem) =>
    h("p", { class: "problem", role: "alert" }, `${problem.message} ${problem.hint}`,
      snapshot.as_of ? ` Shown as of ${clock(snapshot.as_of)}.` : ""));
}

const PAGE = 50;
const COLUMNS = ["Agent", "Status", "Since", "Round", "Tokens", "Cost", "Restarts", "Pid", "Session"];
const HEADS = { Tokens: "Tokens in all", Cost: "Cost in all" };

function makeRow(row) {
  const cells = COLUMNS.map((name) => h("td", { class: `c-${name.toLowerCase()}` }));
  const anchor = link(row.session_id);
  cells[0].append(h("span", { class: "branch" }), anchor);
  const element = h("tr", { onclick: (event) => { if (!event.target.closest("a")) anchor.click(); } }, cells);
  element.cells_ = cells;
  return element;
}

function updateRow(element, row, at, crashed) {
  const [agent, status, since, round, tokens, cost, restarts, pid, session] = element.cells_;
  const indent = String(row.indent || 0);
  if (agent.dataset.indent !== indent) {
    agent.dataset.indent = indent;
    text(agent.firstChild, row.indent ? `${" ".repeat(row.indent - 1)}└ ` : "");
  }
  text(agent.lastChild, row.agent);
  if (status.dataset.status !== row.status) {
    status.dataset.status = row.status;
    status.replaceChildren(pill(row.status));
  }
  text(since, at ? age(at - (row.wait && row.wait_since ? row.wait_since : row.updated_at)) : moment(row.created_at));
  text(round, row.round);
  text(tokens, short(row.tokens_used));
  text(cost, money(row.cost_used));
  text(restarts, row.restarts || "");
  restarts.classList.toggle("bad", row.restarts > 0);
  text(pid, row.actor_pid || "–");
  text(session, brief(row.session_id));
  session.title = row.session_id;
  element.classList.toggle("crashed", crashed);
}

function table(caption, since) {
  const body = h("tbody");
  const heads = COLUMNS.map((name) => h("th", { class: `c-${name.toLowerCase()}`, scope: "col" }, name === "Since" ? since : HEADS[name] || name));
  rowKeys(body, "a");
  return { body, element: h("div", { class: "scroll" }, h("table", { "aria-label": caption }, h("thead", null, h("tr", null, heads)), body)) };
}

// A search of all sessions, a page at a time. It asks again when somebody types or wants more and, as long as no more is
// shown than the first page, when sessions come or end.
function search(page) {
  let rows = [], next = null, asked = 0, known = "", deeper = false;
  const filter = h("input", { type: "search", placeholder: "id, agent or tree  ( / )", "aria-label": "Search sessions" });
  const statuses = ["idle", "running", "waiting_for_model", "waiting_for_child", "waiting_for_input", "waiting_for_timer", "completed",
    "failed", "cancelled", "quarantined"];
  const status = h("select", { "aria-label": "Status" }, h("option", { value: "" }, "any status"),
    statuses.map((name) => h("option", { value: name }, words(name))));
  const more = h("button", { hidden: true, onclick: () => load(false) }, "More");
  const none = h("p", { class: "quiet" });
  const { body, element } = table("All sessions", "Created");
  async function load(anew) {
    const turn = ++asked;
    deeper = !anew;
    const query = new URLSearchParams({ text: filter.value, limit: String(PAGE) });
    if (status.value) query.append("status", status.value);
    if (!anew && next) query.append("cursor", next.join(","));
    try {
      const found = await get(`/api/sessions?${query}`);
      if (turn !== asked) return;
      rows = anew ? found.rows : [...rows, ...found.rows];
      next = found.next;
      text(none, rows.length ? "" : next ? "None among those looked at so far." : filter.value || status.value ? "No session is like that." : "There is no session yet.");
    } catch (error) {
      text(none, error.message);
      if (error.status === 401) page.refused(error);
    }
    sync(body, rows, (row) => row.session_id, makeRow, (made, row) => updateRow(made, row, 0, false));
    more.hidden = !next;
  }
  let timer;
  filter.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => load(true), 250); });
  status.addEventListener("change", () => load(true));
  load(true);
  const panel = h("section", { class: "panel" }, h("div", { class: "bar" }, h("h2", null, "All sessions"), filter, status,
    h("button", { onclick: () => load(true) }, "Refresh")), element, none, more);
  function changed(totals) {
    const now = JSON.stringify(totals);
    if (known !== now && !deeper) load(true);
    known = now;
  }
  return { panel, changed };
}

export function fleetView(main, page) {
  const top = h("div", { class: "cards" }), trouble = h("div");
  const incidents = h("ol", { class: "incidents" }), calm = h("p", { class: "quiet" });
  const { body, element } = table("Sessions at work", "Since");
  const rest = h("p", { class: "quiet" });
  const all = search(page);
  main.append(h("h1", { class: "hidden" }, "Cluster"), trouble, top,
    h("section", { class: "panel" }, h("h2", null, "At work"), element, rest),
    h("section", { class: "panel" }, h("h2", null, "What happened"), incidents, calm), all.panel);
  function shown(snapshot) {
    all.changed(snapshot.totals);
    show(trouble, problems(snapshot));
    show(top, cards(snapshot));
    const crashed = new Set(snapshot.incidents.filter((item) => item.type === "session_crashed" && snapshot.at - item.at < RECENT_US)
      .map((item) => item.session_id));
    sync(body, snapshot.sessions, (row) => row.session_id, makeRow,
      (made, row) => updateRow(made, row, snapshot.at, crashed.has(row.session_id)));
    const working = Object.values(snapshot.statuses).reduce((sum, count) => sum + count, 0);
    text(rest, !working ? "No session has work to do." :
      working > snapshot.sessions.length ? `${working - snapshot.sessions.length} more; search for them below.` : "");
    text(calm, snapshot.incidents.length ? "" : "Nothing out of the ordinary.");
    sync(incidents, snapshot.incidents, (item) => `${item.session_id}/${item.seq}`, (item) =>
      h("li", null, h("time", null, moment(item.at)), " ", h("span", { class: `pill ${kind(item)}` }, words(item.type)), " ",
        item.session_id ? link(item.session_id, item.agent, " ", brief(item.session_id)) : item.agent, " ", h("span", { class: "told" }, told(item))), () => {});
  }
  return stream("/api/fleet/stream", { fleet: shown }, { state: page.state, refused: page.refused, check: () => get("/api/me").then((me) => {
    if (me.locked) page.refused(Object.assign(new Error("locked"), { status: 401 }));
  }) });
}

