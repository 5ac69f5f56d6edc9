// A search of all sessions, a page at a time, and what is done to those that are chosen. It asks again when somebody changes
// the filter or wants more and, as long as no more is shown than the first page, when sessions come or end.

import { get } from "./api.js";
import { Bulk } from "./bulk.js";
import { h, sync, text } from "./dom.js";
import { Filters } from "./filters.js";
import { makeRow, table, updateRow } from "./rows.js";

const PAGE = 50;
const TYPING_MS = 250;
const COLUMNS = ["Agent", "Status", "Ended", "Created", "Tokens", "Cost", "Restarts", "Session"];

export class Search {
  constructor(query, page) {
    Object.assign(this, { page, rows: [], next: null, turn: 0, known: "", deeper: false });
    this.filters = new Filters((typed) => this.changedFilter(typed));
    this.bulk = page.me.may_act ? new Bulk(() => this.filters.asked, () => this.rows, () => this.load(true)) : null;
    this.columns = this.bulk ? ["Select", ...COLUMNS] : COLUMNS;
    const { body, element } = table("All sessions", this.columns, this.bulk?.all);
    this.body = body;
    this.none = h("p", { class: "quiet", role: "status" });
    this.more = h("button", { hidden: true, onclick: () => this.load(false) }, "More");
    this.panel = h("section", { class: "panel" }, h("div", { class: "bar" }, h("h2", null, "All sessions"), h("span", { class: "space" }),
      h("button", { onclick: () => { location.hash = "#/"; } }, "Clear the filter"), h("button", { onclick: () => this.load(true) }, "Refresh")),
    this.filters.element, this.bulk?.bar, element, this.none, this.more);
    this.filters.set(query);
    this.load(true);
  }

  get address() {
    return this.filters.query ? `#/?${this.filters.query}` : "#/";
  }

  // While somebody types the address only changes; each choice is a step that "back" takes back.
  changedFilter(typed) {
    clearTimeout(this.timer);
    this.bulk?.clear();
    this.page.fleet = this.address;
    if (typed) {
      history.replaceState(null, "", this.address);
      this.timer = setTimeout(() => this.load(true), TYPING_MS);
    } else if (location.hash !== this.address) history.pushState(null, "", this.address), this.load(true);
  }

  go(query) {
    if (this.filters.query === new URLSearchParams(query).toString()) return;
    this.filters.set(query);
    this.bulk?.clear();
    this.load(true);
  }

  // How many sessions there are has changed.
  changed(totals) {
    const now = JSON.stringify(totals);
    if (this.known && this.known !== now && !this.deeper) this.load(true);
    this.known = now;
  }

  async load(first) {
    const turn = ++this.turn;
    this.deeper = !first;
    const query = this.filters.asked;
    query.set("limit", String(PAGE));
    if (!first && this.next) query.set("cursor", this.next.join(","));
    try {
      const found = await get(`/api/sessions?${query}`);
      if (turn !== this.turn) return;
      this.rows = first ? found.rows : [...this.rows, ...found.rows];
      this.next = found.next;
      text(this.none, this.rows.length ? "" : this.next ? "No sessions match among those searched so far." : this.filters.query ? "No sessions match." : "There are no sessions yet.");
    } catch (error) {
      if (turn !== this.turn) return;
      text(this.none, error.message);
      if (error.status === 401) this.page.refused(error);
    }
    sync(this.body, this.rows, (row) => row.session_id, (row) => this.make(row), (made, row) => updateRow(made, row, 0, false));
    this.bulk?.draw();
    this.more.hidden = !this.next;
  }

  make(row) {
    const made = makeRow(row, this.columns);
    if (this.bulk) this.bulk.offer(made, row);
    return made;
  }
}
