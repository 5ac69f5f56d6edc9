// Rows of sessions, as the tables of the first page have them.

import { h, rowKeys, text } from "./dom.js";
import { age, brief, moment, money, short, words } from "./format.js";

export function pill(status) {
  return h("span", { class: `pill ${status}` }, words(status));
}

export function link(session, ...content) {
  return h("a", { href: `#/session/${encodeURIComponent(session)}`, title: session }, ...content);
}

const HEADS = { Tokens: "Total tokens", Cost: "Total cost", Ended: "Last run" };

export function makeRow(row, columns) {
  const cells = columns.map((name) => h("td", { class: `c-${name.toLowerCase()}` }));
  const anchor = link(row.session_id);
  cells[columns.indexOf("Agent")].append(h("span", { class: "branch" }), anchor);
  const element = h("tr", { onclick: (event) => { if (!event.target.closest("a, input, label")) anchor.click(); } }, cells);
  element.cells_ = Object.fromEntries(columns.map((name, place) => [name, cells[place]]));
  return element;
}

export function updateRow(element, row, at, crashed) {
  const cells = element.cells_;
  const indent = String(row.indent || 0);
  if (cells.Agent.dataset.indent !== indent) {
    cells.Agent.dataset.indent = indent;
    text(cells.Agent.firstChild, row.indent ? `${" ".repeat(row.indent - 1)}└ ` : "");
  }
  text(cells.Agent.lastChild, row.agent);
  if (cells.Status.dataset.status !== row.status) {
    cells.Status.dataset.status = row.status;
    cells.Status.replaceChildren(pill(row.status));
  }
  if (cells.Since) text(cells.Since, age(at - (row.wait && row.wait_since ? row.wait_since : row.updated_at)));
  if (cells.Created) text(cells.Created, moment(row.created_at));
  if (cells.Ended) lastRun(cells.Ended, row);
  if (cells.Round) text(cells.Round, row.round);
  text(cells.Tokens, short(row.tokens_used));
  text(cells.Cost, money(row.cost_used));
  text(cells.Restarts, row.restarts || "");
  cells.Restarts.classList.toggle("bad", row.restarts > 0);
  if (cells.Pid) text(cells.Pid, row.actor_pid || "–");
  text(cells.Session, brief(row.session_id));
  cells.Session.title = row.session_id;
  element.classList.toggle("crashed", crashed);
}

// How the last run ended, and when: a link to its trace.
function lastRun(cell, row) {
  const shown = `${row.ended_as || ""}${row.ended_at || 0}`;
  if (cell.dataset.shown === shown) return;
  cell.dataset.shown = shown;
  cell.replaceChildren(row.ended_at ? h("a", { href: `#/session/${encodeURIComponent(row.session_id)}/trace`, "aria-label": `Trace: ${words(row.ended_as)}, ${moment(row.ended_at)}` },
    pill(row.ended_as), " ", moment(row.ended_at)) : "–");
}

export function table(caption, columns, first) {
  const body = h("tbody");
  const heads = columns.map((name) => h("th", { class: `c-${name.toLowerCase()}`, scope: "col" }, name === "Select" ? first : HEADS[name] || name));
  rowKeys(body, "td.c-agent a");
  return { body, element: h("div", { class: "scroll" }, h("table", { "aria-label": caption }, h("thead", null, h("tr", null, heads)), body)) };
}

// A table whose rows become paragraphs on a narrow page; `row` makes one, its cells empty.
export function stacked(caption, heads) {
  const body = h("tbody");
  const titles = heads.map((name) => h("th", { scope: "col" }, name || h("span", { class: "hidden" }, "Actions")));
  const element = h("div", { class: "scroll" }, h("table", { class: "stacked", "aria-label": caption }, h("thead", null, h("tr", null, titles)), body));
  return { body, element, row: () => h("tr", null, heads.map((name, place) => h(place ? "td" : "th", place ? { "data-name": name || null } : { scope: "row", class: "mono" }))) };
}
